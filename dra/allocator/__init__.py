"""The structured allocator: the same decisions as kube-scheduler's."""
