"""Checks of the records of a generator: each can be decoded, and belongs where it is written.

The SDK makes the same checks before it encodes a record. A program without the SDK may not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import numpy as np

from turnstream.errors import InvalidTurnError, RecordError
from turnstream.generator.encode.checks import MAX_LOGPROB, MAX_RECORD_BYTES
from turnstream.generator.encode.group_checks import (
    checked_metrics,
    checked_opening,
    checked_reward,
    checked_tags,
    require_turns,
)
from turnstream.records.events import MAX_EVENT_BYTES, MAX_TURNS, decode_event
from turnstream.records.turns import decode_turn
from turnstream.store.run.groups import ATTEMPT_LIMIT
from turnstream.types import (
    GroupOpened,
    RewardPosted,
    SealedTrajectory,
    StoredTurn,
    TrajectoryKey,
    VersionRun,
)
from turnstream.types.scalars import named_numbers

_Event = TypeVar("_Event")


def check_turn(record: bytes, *, index: int) -> None:
    """Check the record of the turn with this index in its trajectory.

    Raises:
        RecordError: it is no turn, or another one.
        InvalidTurnError: a field has a value that no turn can have.
    """
    if len(record) > MAX_RECORD_BYTES:
        raise RecordError(f"turn {index} has {len(record)} bytes, more than {MAX_RECORD_BYTES}")
    turn = decode_turn(record)
    if turn.index != index or index >= MAX_TURNS:
        raise RecordError(f"turn {turn.index} stands at {index}, of at most {MAX_TURNS} turns")
    _check_values(turn)


def check_seal(record: bytes, *, key: TrajectoryKey) -> SealedTrajectory:
    """Return the seal of this trajectory from its record; errors as of `check_turn`."""
    seal = event_of(record, SealedTrajectory)
    _check_key(seal.key, expected=key)
    require_turns(len(seal.turns), seal.status)
    checked_reward(seal.reward, awaits_reward=seal.awaits_reward)
    checked_metrics(seal.metrics)
    checked_tags(seal.tags)
    named_numbers(seal.reward_components, field="reward_components")
    named_numbers(seal.sampling, field="sampling")
    if not all(map(math.isfinite, seal.turn_rewards)):
        raise InvalidTurnError("turn_rewards", "one of them is no finite number")
    for runs in seal.turn_versions:
        _check_versions(runs)
    return seal


def check_opening(record: bytes) -> GroupOpened:
    """Return the event of a group that begins, from its record; errors as of `check_turn`."""
    group = event_of(record, GroupOpened)
    checked_opening(
        group.group_id,
        group.num_samples,
        group.prompt_uid,
        num_needed=group.num_needed,
        purpose=group.purpose,
    )
    return group


def check_reward(record: bytes, *, key: TrajectoryKey) -> None:
    """Check the record of a reward of this trajectory; errors as of `check_turn`."""
    posted = event_of(record, RewardPosted)
    _check_key(posted.key, expected=key)
    components: Mapping[str, float] = posted.reward_components
    named_numbers(components, field="reward_components")
    if checked_reward(posted.reward) is None and not components:
        raise InvalidTurnError("reward", "there is none, and no component")


def event_of(record: bytes, kind: type[_Event]) -> _Event:
    """Return the event of a record, which must be of this kind."""
    if len(record) > MAX_EVENT_BYTES:
        raise RecordError(f"an event has {len(record)} bytes, more than {MAX_EVENT_BYTES}")
    event = decode_event(record)
    if not isinstance(event, kind):
        raise RecordError(f"the record is {type(event).__name__}, expected {kind.__name__}")
    return event


def _check_key(key: TrajectoryKey, *, expected: TrajectoryKey) -> None:
    if key != expected:
        raise RecordError(f"the record is one of {key.readable_name}, not {expected.readable_name}")
    if key.attempt >= ATTEMPT_LIMIT:
        raise RecordError(f"attempt {key.attempt} is not below {ATTEMPT_LIMIT}")


_LEAST: Final = np.minimum.reduce
_LARGEST: Final = np.maximum.reduce


def _check_values(turn: StoredTurn) -> None:
    """Check what `decode_turn` leaves open: token ids, and numbers that are finite."""
    tokens = turn.token_ids
    if len(tokens) and _LEAST(tokens) < 0:
        raise InvalidTurnError("token_ids", f"{_LEAST(tokens)} is not a token id (0 to 2^31 - 1)")
    logprobs = turn.logprobs
    # Both comparisons are false where there is a NaN.
    if (
        logprobs is not None
        and len(logprobs)
        and not (_LARGEST(logprobs) <= MAX_LOGPROB and _LEAST(logprobs) > -math.inf)
    ):
        raise InvalidTurnError("logprobs", "one of them is not a finite number of at most 0")
    if turn.rewards is not None:
        _check_finite(turn.rewards, field="rewards")
    for name, piece in turn.extras.items():
        if piece.values.dtype.kind == "f":
            _check_finite(piece.values, field=f"extras[{name!r}]")
    _check_versions(turn.version_runs)


def _check_finite(values: Any, *, field: str) -> None:
    if not np.isfinite(values).all():
        raise InvalidTurnError(field, f"one of them is not a finite {values.dtype}")


def _check_versions(runs: tuple[VersionRun, ...]) -> None:
    for version, num_tokens in runs:
        if (version is not None and version < 0) or num_tokens < 1:
            raise InvalidTurnError("version_runs", f"{num_tokens} tokens of version {version}")
