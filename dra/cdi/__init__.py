"""CDI: what a container is given of a GPU, as specs that container engines inject.

`CdiRenderer.render` gives a claim's spec from the node as it is; `SpecFiles` writes, removes and finds the files. The
rules of the specification and of names are in `spec`; everything that decides (`exposure`, `edits`) is pure.
"""
