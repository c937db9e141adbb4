"""The lease of the leader, its snapshots, and the clock that it keeps."""
