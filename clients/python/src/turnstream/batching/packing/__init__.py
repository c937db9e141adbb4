"""Weighted items into parts, rows into bins, and bins into forward passes under a budget."""
