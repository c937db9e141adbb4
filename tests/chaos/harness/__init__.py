"""Real processes, real faults, and a checker that believes only what the processes logged.

==============  ========================================================================
episodes        what generators say: every token is unique, so a row names its origin
log             one fsynced file per process, appended to before and after every call
generator       a process that publishes groups
rank            a process that trains, one per `dp_rank`
newer           runs a process as the next minor release would
history         all logs of a run as one history, and what survives of it
leaders         what batchers logged of their plans
checker         the invariants I1 to I8, each a function of the history
repeater        sends every call of gRPC several times at once
proxy           a TCP proxy that cuts, delays and swallows
health          what a batcher says of its health
machine         clocks that jump, and a disk that is slow or loses its power
rig             store, batchers, generators and ranks together
soak            random faults over a running rig
==============  ========================================================================
"""
