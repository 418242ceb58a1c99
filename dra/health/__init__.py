"""Device conditions and the health stream's content."""
