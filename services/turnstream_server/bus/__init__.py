"""The state of runs in Redis: scripts, the calls of planner and sessions, and queries."""
