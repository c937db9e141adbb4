"""The state of one run: its configs, groups, leases, rewards, tasks, bytes and evaluations."""
