"""What is particular to a kind: defaults, what a client may not set, generation, validation."""
