"""The cluster's side of the driver: one process, elected among its replicas, for what no node can do alone."""
