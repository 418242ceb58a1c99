"""Random claims, faults and restarts for as long as asked; see `__main__`."""
