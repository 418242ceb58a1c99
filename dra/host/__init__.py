"""The node's files: where they are, how they are read, how they are written so that they last.

Everything that touches the file system outside the claim's own record asks here. Knows nothing of NVML,
Kubernetes or CDI.
"""
