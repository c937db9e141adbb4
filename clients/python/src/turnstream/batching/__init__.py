"""Turns in, training rows out: pure functions over numpy. No clock, no I/O, no randomness.

A run plans and assembles its rows itself. Who makes rows of his own has, beside the layouts,
packing and denominators that a run uses:

- `checks.require_whole_trajectories`: refuses trajectories that are interrupted or flagged wrongly.
- `rewards.rewards_on_last_token`: one reward per row as rewards of its tokens.
- `minibatch.mini_batch_bounds`: where mini-batches of whole groups begin and end.
"""
