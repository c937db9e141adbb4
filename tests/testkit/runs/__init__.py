"""Runs in a store, written by their scripts or by hand."""
