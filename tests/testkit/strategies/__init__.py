"""Hypothesis strategies of everything that Turnstream passes around. Needs hypothesis.

Token ids come from a small alphabet, so that contexts repeat, extend and resemble each other.
"""

from testkit.strategies.extras import declared_columns, with_extras
from testkit.strategies.plans import configs, events, manifests, sealed_trajectories
from testkit.strategies.rows import extra_columns, mini_batches, operation_mini_batches, scored_rows
from testkit.strategies.turns import (
    chains,
    groups,
    stored_turns,
    trajectories,
    trees,
    turns,
    version_runs,
)
from testkit.strategies.values import names, tokens

__all__ = [
    "chains",
    "configs",
    "declared_columns",
    "events",
    "extra_columns",
    "groups",
    "manifests",
    "mini_batches",
    "names",
    "operation_mini_batches",
    "scored_rows",
    "sealed_trajectories",
    "stored_turns",
    "tokens",
    "trajectories",
    "trees",
    "turns",
    "version_runs",
    "with_extras",
]
