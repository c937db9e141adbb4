"""Lives of a run from seeds: the real code and the real scripts, one thread, no clock but ours.

`store` and `lua` are the server in memory, `clients` its clients, `loops` the event loops of
processes that can be stopped anywhere, `world` the scheduler and its faults, `generators` and
`services` what the processes do, `laws` what must hold. `lives` puts them together, `guards` breaks
the code to see whether a life shows it. `python -m simulator --help`.
"""
