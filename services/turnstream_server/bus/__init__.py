"""What planner and trainer sessions do to a run in Redis, and what there is to read of it."""
