"""Hypothesis strategies of everything that Turnstream passes around. Needs hypothesis.

Token ids come from a small alphabet, so that contexts repeat, extend and resemble each other.
"""

from testkit.strategies.extras import declared_columns, with_extras
from testkit.strategies.plans import configs, events, manifests
from testkit.strategies.rows import extra_columns, mini_batches, operation_mini_batches, scored_rows
from testkit.strategies.turns import chains, forests, stored_turns, trees

__all__ = [
    "chains",
    "configs",
    "declared_columns",
    "events",
    "extra_columns",
    "forests",
    "manifests",
    "mini_batches",
    "operation_mini_batches",
    "scored_rows",
    "stored_turns",
    "trees",
    "with_extras",
]
