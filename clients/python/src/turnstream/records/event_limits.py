"""Limits on the values of an event: no plan can hold an event that exceeds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from turnstream.errors import CorruptRecordError
from turnstream.types import (
    DeadlineFired,
    Event,
    GroupOpened,
    PlansWithdrawn,
    RefillGranted,
    RewardPosted,
    SealedTrajectory,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
    TurnShape,
)
from turnstream.types.names import encode_name

MAX_EVENT_BYTES: Final = 1 << 20
"""Longest record of an event."""

MAX_TURNS: Final = 10_000
"""Turns of one trajectory, at most."""

MAX_TURN_TOKENS: Final = 2**31 - 1
"""Tokens of one turn's whole prompt and response, at most: rows are indexed with int32."""

MAX_NUMBER: Final = 2**31 - 1
"""Largest number of a sample or an attempt."""


def check_event(event: Event) -> None:
    """Check the values for a plan or the ledger; CorruptRecordError names value and limit."""
    match event:
        case SealedTrajectory():
            check_key(event.key)
            _check_turns(event.turns)
        case GroupOpened():
            _check_group(event)
        case DeadlineFired(awaited=None):
            _check_name(event.group_id)
        case DeadlineFired(awaited=TrajectoryKey() as key):
            check_key(key)
        case PlansWithdrawn():
            for key in event.dead:
                check_key(key)
        case TrajectoryAbandoned() | TrajectoryDied() | RefillGranted() | RewardPosted():
            check_key(event.key)
        case _:
            pass


def check_num_turns(num_turns: int) -> None:
    """Check the number of turns of a seal, before any of them is decoded."""
    if num_turns > MAX_TURNS:
        raise CorruptRecordError(f"a seal has {num_turns} turns, more than {MAX_TURNS}")


def check_key(key: TrajectoryKey) -> None:
    """Check the name of a trajectory's group, and the numbers of its sample and attempt."""
    _check_name(key.group_id)
    for field, number in (("sample", key.sample), ("attempt", key.attempt)):
        if not 0 <= number <= MAX_NUMBER:
            raise CorruptRecordError(f"{field} {number} of a trajectory is not in 0..{MAX_NUMBER}")


def _check_turns(turns: Sequence[TurnShape]) -> None:
    for index, turn in enumerate(turns):
        if turn.num_tokens > MAX_TURN_TOKENS:
            raise CorruptRecordError(
                f"turn {index} of a seal has {turn.num_tokens} tokens, more than {MAX_TURN_TOKENS}"
            )


def _check_group(event: GroupOpened) -> None:
    _check_name(event.group_id)
    if not 1 <= event.num_needed <= event.num_samples:
        raise CorruptRecordError(
            f"a group of {event.num_samples} samples needs {event.num_needed} of them"
        )


def _check_name(group_id: str) -> None:
    try:
        encode_name(group_id)
    except ValueError as error:
        raise CorruptRecordError(f"no group has this name: {error}") from error
