"""The store in memory, with real scripts."""
