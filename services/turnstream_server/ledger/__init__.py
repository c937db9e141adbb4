"""The state of runs in Redis: scripts, the calls of planner and sessions, and queries.

Every call raises StoreUnavailableError if the store cannot be reached, and RunNotFoundError if the
run does not exist. A write of a leader that lost its term raises FencedError.
"""
