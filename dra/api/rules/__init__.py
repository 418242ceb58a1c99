"""The API server's rules of resource.k8s.io and of pods, as pure functions: shapes, defaults, what is refused and how.

For the simulated API server, `dra validate` and admission. The node daemon never imports this.
"""
