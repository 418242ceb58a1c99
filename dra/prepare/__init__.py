"""Claims to prepared devices. The only room that changes a node."""
