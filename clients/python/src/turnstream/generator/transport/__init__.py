"""Threads and tasks that send an outbox to the store, and calls of several steps."""
