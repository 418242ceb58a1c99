"""The parts of a sweep: what the janitor looks for, and how long it waits before it believes it."""
