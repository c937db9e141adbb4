"""Policies: loading and saving them, their log-probabilities, and sampling from them."""
