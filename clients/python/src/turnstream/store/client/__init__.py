"""Connections to the store: keys, scripts, replies, deadlines, and the ids of runs."""
