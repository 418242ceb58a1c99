"""The node's files: roots, proc, sys, dev, driver files, ld cache, boot id, durable writes."""
