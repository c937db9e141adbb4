"""Writes of generators in any language: groups, turns, whole trajectories and rewards."""
