"""CEL as DRA selectors use it: parser, checker, evaluator and the Kubernetes functions."""
