"""Figures beside their budgets: `make bench`. Nothing here is a test; a slow machine fails nothing."""
