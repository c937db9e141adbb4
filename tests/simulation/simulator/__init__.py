"""Simulated runs from seeds: the real code and the real scripts, in one thread with its own clock.

- `store`, `commands` and `lua` are the server in memory, and `clients` its clients.
- `processes` have event loops that can be stopped between any two calls.
- `world` is the scheduler with its `faults`.
- `generators`, `services`, `trainers` and `operators` are the processes.
- `schedules` draws settings and faults, `execution` runs them, and `runs` judges many seeds.
- `invariants` compares the store with a `run_writes`.
- `guards` breaks the code, to show that a simulated run fails then.
"""
