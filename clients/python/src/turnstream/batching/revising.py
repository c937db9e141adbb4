"""Which settings of a run may change while it goes on, and what a change consists of."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final, NamedTuple

from turnstream.batching.config import BatchingConfig
from turnstream.errors import InvalidConfigError

FIXED: Final = {
    "extra_columns": "generators learn it once, and turns that are stored were checked by it",
    "aggregation": "a trainer chooses its loss by it when its session begins",
    "row_weights": "a trainer refuses rows that weigh otherwise than when its session began",
}
"""Settings that a run keeps, and what a change would break."""


class Change(NamedTuple):
    """One setting that differs."""

    name: str
    before: Any
    after: Any


def changed_settings(before: BatchingConfig, after: BatchingConfig) -> tuple[Change, ...]:
    """The settings that differ, in their order.

    >>> config = BatchingConfig(batch_groups=2, mini_batch_groups=2)
    >>> from dataclasses import replace
    >>> changed_settings(config, replace(config, max_staleness=2))
    (Change(name='max_staleness', before=1, after=2),)
    """
    pairs = [(f.name, getattr(before, f.name), getattr(after, f.name)) for f in fields(after)]
    return tuple(Change(*pair) for pair in pairs if pair[1] != pair[2])


def check_revision(before: BatchingConfig, after: BatchingConfig) -> None:
    """Make sure that a run may go on with another configuration.

    Raises:
        InvalidConfigError: names a setting that cannot change, and why.
    """
    for change in changed_settings(before, after):
        if change.name in FIXED:
            raise InvalidConfigError(
                change.name,
                f"it cannot be revised from {change.before!r} to {change.after!r}: "
                f"{FIXED[change.name]}; begin another run",
            )
