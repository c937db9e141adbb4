"""Turns in, training rows out: pure functions over numpy. No clock, no I/O, no randomness."""
