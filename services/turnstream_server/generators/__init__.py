"""What makes trajectories: recorded ones replayed, and live ones sampled from a policy."""
