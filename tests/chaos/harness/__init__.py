"""Real processes, real faults, and a checker that believes only what the processes logged.

==============  ========================================================================
episodes        what generators say: every token is unique, so a row names its origin
log             one fsynced file per process, appended to before and after every call
generator       a process that publishes groups
poster          a process that posts rewards of what generators sealed without one
observer        a process that observes beside the ranks
rank            a process that trains, one per `dp_rank`
newer           runs a process as the next minor release would
history         all logs of a run as one history, and what survives of it
leaders         what batchers logged of their plans
checker         the invariants I1 to I8, each a function of the history
members         whose work is trained
observers       what observers saw of the batches
rewards         which of the rewards that were posted is trained
versions        whose weights have which number, and which trainer session is heard
refusals        what generators and posters may be refused
archives        what the archive folder has of the steps that were trained
prompts         what becomes of the prompts of a run, and of evaluations
cuts            what a store under everysec was left with, and what that excuses
repeater        sends every call of gRPC several times at once
proxy           a TCP proxy that cuts, delays and swallows
health          what a batcher says of its health
machine         clocks that jump, and a disk that is slow or loses its power
rig             store, batchers, generators and ranks together
sleepers        processes that are stopped for a while
running         what a long run keeps running, and what it leaves to chance
faults          what goes wrong in it
doomed          every failpoint of the product, and what brings a process there
beside          small runs in the same store, for what batchers and operators seldom come to
actions         what an operator does to a run that goes on
soak            random faults over a running rig
report          what that has shown
==============  ========================================================================
"""
