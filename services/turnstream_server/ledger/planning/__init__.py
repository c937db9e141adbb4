"""The writes of a leader: manifests, decisions on groups and trajectories, events of time."""
