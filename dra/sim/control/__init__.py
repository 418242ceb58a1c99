"""The simulated control plane beside the API server: the ResourceClaim controller and the scheduler."""
