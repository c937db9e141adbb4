"""Rewards, filters, advantages, denominators and statistics of finished trajectories."""
