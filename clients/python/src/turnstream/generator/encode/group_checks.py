"""Validation of groups, keys, and the fields of a whole trajectory.

Pure functions. Every error names the field and the value.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, TypeVar, cast, get_args

from turnstream.batching.config.values import LARGEST_GROUP
from turnstream.batching.scoring.tag_statistics import MAX_METRIC
from turnstream.errors import InvalidTurnError
from turnstream.store.client.keys import encode_name
from turnstream.store.run.groups import ATTEMPT_LIMIT, most_samples
from turnstream.types import (
    Group,
    GroupOpened,
    Purpose,
    Siblings,
    Status,
    Trajectory,
    TrajectoryKey,
)
from turnstream.types.names import (
    checked_text,
    finite_number,
    named_numbers,
    named_values,
    quoted,
    whole_number,
)

_MAX_LABELS: Final = 64
"""Tags, and metrics, of one trajectory: the planner keeps those of every trajectory that waits."""

_MAX_LABEL_BYTES: Final = 128
_MAX_TAG_BYTES: Final = 256
_SAMPLE_LIMIT: Final = 2**31

_Choice = TypeVar("_Choice", bound=StrEnum)


def checked_opening(
    group_id: str,
    num_samples: int,
    prompt_uid: str,
    *,
    num_needed: int | None = None,
    purpose: Purpose | str = Purpose.TRAIN,
) -> GroupOpened:
    """Return the event of a group that begins; `num_needed` None means all samples.

    An evaluation has no `num_needed`, which would bias it.
    """
    checked_name(group_id, field="group_id")
    num_samples = whole_number(num_samples, field="num_samples", least=1, limit=_SAMPLE_LIMIT)
    if num_samples > (most := most_samples(group_id)):
        name = f"a group_id of {len(group_id)} characters" if most < LARGEST_GROUP else "a group"
        raise InvalidTurnError("num_samples", f"{num_samples} is above {most}, the most of {name}")
    needed = num_samples
    if num_needed is not None:
        needed = whole_number(num_needed, field="num_needed", least=1, limit=_SAMPLE_LIMIT)
    if needed > num_samples:
        raise InvalidTurnError("num_needed", f"{needed} of {num_samples} samples")
    purpose = _choice(Purpose, purpose, field="purpose")
    if purpose is Purpose.EVAL and needed != num_samples:
        raise InvalidTurnError(
            "num_needed", f"{needed} of {num_samples} samples: an evaluation counts them all"
        )
    return GroupOpened(
        group_id=group_id,
        prompt_uid=checked_text(prompt_uid, field="prompt_uid"),
        num_samples=num_samples,
        num_needed=needed,
        purpose=purpose,
    )


def checked_key(key: TrajectoryKey, *, num_samples: int | None = None) -> TrajectoryKey:
    """Return the key of a member of a group of `num_samples`, or of any size for None."""
    checked_name(key.group_id, field="group_id")
    sample = whole_number(key.sample, field="sample", limit=_SAMPLE_LIMIT)
    attempt = checked_attempt(key.attempt)
    if num_samples is not None and sample >= num_samples:
        raise InvalidTurnError("sample", f"{sample} in a group of {num_samples}, from 0")
    return TrajectoryKey(key.group_id, sample, attempt)


def checked_attempt(attempt: Any) -> int:
    """Return the number of an attempt at a sample."""
    return whole_number(attempt, field="attempt", limit=ATTEMPT_LIMIT)


def checked_group(group: Group) -> tuple[GroupOpened, list[Trajectory]]:
    """Return the event of a whole group, and its trajectories in order of their samples."""
    if not isinstance(group, Group):
        raise InvalidTurnError("group", f"{quoted(group)} is not a Group")
    members = group.trajectories
    check_list_of(members, Trajectory, field="trajectories")
    samples = sorted(
        whole_number(each.sample, field="sample", limit=_SAMPLE_LIMIT) for each in members
    )
    opening = checked_opening(group.group_id, len(samples), group.prompt_uid, purpose=group.purpose)
    if samples != list(range(len(samples))):
        raise InvalidTurnError("sample", f"{samples} are not 0 to {len(samples) - 1}, each once")
    return opening, sorted(members, key=operator.attrgetter("sample"))


def check_list_of(values: object, kind: type[object], *, field: str) -> None:
    """Refuse a value that is no sequence of objects of one type."""
    given = cast("Sequence[object]", values)
    if not isinstance(values, Sequence) or not all(isinstance(each, kind) for each in given):
        raise InvalidTurnError(field, f"{quoted(values)} is not a list of {kind.__name__}")


def checked_name(name: str, *, field: str) -> str:
    """Return the name in the form that keys have."""
    try:
        return encode_name(checked_text(name, field=field))
    except ValueError as error:
        if isinstance(error, InvalidTurnError):
            raise
        raise InvalidTurnError(field, str(error)) from error


def checked_reward(reward: Any, *, awaits_reward: bool = False) -> float | None:
    """Return the outcome reward as a finite float, or None."""
    if reward is not None and awaits_reward:
        raise InvalidTurnError(
            "reward", f"{quoted(reward)} is given, but awaits_reward says that it comes later"
        )
    return None if reward is None else finite_number(reward, field="reward")


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return finite numbers, sorted by key."""
    if not (numbers := named_numbers(metrics, field="metrics")):
        return numbers
    _check_labels(numbers, field="metrics")
    for name, number in numbers.items():
        if abs(number) > MAX_METRIC:
            raise InvalidTurnError(f"metrics[{name!r}]", f"{number!r} is beyond {MAX_METRIC:g}")
    return numbers


def checked_tags(tags: Mapping[str, str] | None) -> dict[str, str]:
    """Return labels, sorted by key."""
    if not (texts := named_values(tags, field="tags")):
        return texts
    for name, text in texts.items():
        field = f"tags[{name!r}]"
        _check_size(checked_text(text, field=field), field=field, most=_MAX_TAG_BYTES)
    _check_labels(texts, field="tags")
    return dict(sorted(texts.items()))


def checked_status(status: Status | str) -> Status:
    """Return the way in which an episode ended."""
    return _choice(Status, status, field="status")


def checked_siblings(siblings: Siblings) -> Siblings:
    """Return the treatment of turns without continuation that have a continued sibling."""
    if siblings not in get_args(Siblings):
        names = ", ".join(map(repr, get_args(Siblings)))
        raise InvalidTurnError("siblings", f"{quoted(siblings)} is none of {names}")
    return siblings


def require_turns(num_turns: int, status: Status) -> None:
    """Refuse the end of a trajectory without a turn, unless it failed before its first one."""
    if not num_turns and status is not Status.ERROR:
        raise InvalidTurnError("turns", "there is none; only status='error' needs no turn")


def _check_labels(values: Mapping[str, Any], *, field: str) -> None:
    if len(values) > _MAX_LABELS:
        raise InvalidTurnError(field, f"has {len(values)} names, more than {_MAX_LABELS}")
    for name in values:
        if not name:
            raise InvalidTurnError(field, f"has an empty name, of {values[name]!r}")
        _check_size(name, field=field, most=_MAX_LABEL_BYTES)


def _check_size(text: str, *, field: str, most: int) -> None:
    num_bytes = len(text) if text.isascii() else len(text.encode())
    if num_bytes > most:
        raise InvalidTurnError(field, f"{text[:32]!r}... has {num_bytes} bytes, more than {most}")


def _choice(kind: type[_Choice], value: object, *, field: str) -> _Choice:
    if type(value) is kind:
        return value
    try:
        return kind(value)
    except (ValueError, TypeError) as error:
        choices = ", ".join(kind)
        raise InvalidTurnError(field, f"{quoted(value)} is not one of {choices}") from error
