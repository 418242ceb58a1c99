"""Admission webhooks: which ones a request must pass, how they are called, and what their answers do to it."""
