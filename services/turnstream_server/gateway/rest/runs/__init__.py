"""Runs and their state: settings, tasks, ledgers, batches, versions, waits and events."""
