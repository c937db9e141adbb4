"""The invariants of a simulated run."""
