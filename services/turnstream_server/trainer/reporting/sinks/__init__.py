"""Receivers of the metrics of a training."""
