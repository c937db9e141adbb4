"""The state of a run that every part reads: events, frontier, scans, and the store itself."""
