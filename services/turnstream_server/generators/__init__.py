"""Sources of trajectories: recorded ones replayed, and live ones sampled from a policy."""
