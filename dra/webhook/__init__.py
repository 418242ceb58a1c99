"""Admission: what users write is checked before it is stored, and fractions of GPUs become claims."""
