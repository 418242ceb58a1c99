"""What users and Kubernetes write: claims, opaque configuration, slice types and the API's limits. Pure."""
