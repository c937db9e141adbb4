"""Validation of a generator's data, and its records."""
