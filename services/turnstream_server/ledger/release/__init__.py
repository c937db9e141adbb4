"""Deletion of finished payload, and the compact records that remain."""
