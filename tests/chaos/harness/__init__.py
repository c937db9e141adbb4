"""Real processes, real faults, and a checker that reads only the logs of the processes.

- `rig` starts a store, batchers, generators and ranks; `generator` and `rank` are the processes.
- `proxy`, `machine` and `newer` make faults.
- `checker` proves the invariants from a `history` of the logs, and `losses` the causes of
refusals and what a power cut may take.
- `soak` draws random `faults` over a running stack.
"""
