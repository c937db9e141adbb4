"""Whole jobs: services started together as processes, watched, stopped and summed up."""
