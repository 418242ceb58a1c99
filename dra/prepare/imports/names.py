"""What the way from NVIDIA's driver is known by."""

# What NVIDIA's driver calls its checkpoint, in the directory that is ours too.
CHECKPOINT = "checkpoint.json"
# Stands in a record that came from one.
ORIGIN = "imported_from"
