"""Builders with defaults, comparison and waiting of the tests.

Tokens are written as letters, one per token; a capital is a trained token. So a turn is
`turn("ab", "CD")`, and the rows that it ends up in are compared as text: `spell(rows) == ["abCD"]`.

Hypothesis strategies are in `testkit.strategies`.
"""

from testkit.batches import extra_column, mini_batch, mini_batch_info, operation_rows, rows
from testkit.compare import assert_same
from testkit.letters import ids, mask, spell
from testkit.plans import ZERO_VARIANCE, config, manifest, sealed, shape, trajectory_plan
from testkit.turns import group, stored_turn, trajectory, turn
from testkit.waiting import wait_until, wait_until_async

__all__ = [
    "ZERO_VARIANCE",
    "assert_same",
    "config",
    "extra_column",
    "group",
    "ids",
    "manifest",
    "mask",
    "mini_batch",
    "mini_batch_info",
    "operation_rows",
    "rows",
    "sealed",
    "shape",
    "spell",
    "stored_turn",
    "trajectory",
    "trajectory_plan",
    "turn",
    "wait_until",
    "wait_until_async",
]
