"""Logging set-up, event names and the metrics registry."""
