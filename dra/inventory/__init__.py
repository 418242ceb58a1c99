"""What GPUs and partitions a node has, how they are named, and how two looks at it differ."""
