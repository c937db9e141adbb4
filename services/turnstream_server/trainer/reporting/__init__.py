"""Metrics of a training: their declarations, measurements, receivers, and the plot."""
