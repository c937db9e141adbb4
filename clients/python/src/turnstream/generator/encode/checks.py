"""Validation of everything that a generator sends, once, before it is sent.

Pure functions. Every error names the field, the value and its position.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.config.rules import LARGEST_GROUP
from turnstream.batching.merge.anchors import anchor_hash
from turnstream.batching.scoring.tag_statistics import MAX_METRIC
from turnstream.errors import InvalidTurnError
from turnstream.store.client.keys import encode_name
from turnstream.types import (
    Anchor,
    Group,
    Purpose,
    Status,
    Trajectory,
    TrajectoryKey,
    Turn,
    VersionRun,
)
from turnstream.types.names import checked_text, shown
from turnstream.types.scalars import (
    finite_number,
    flag,
    named_numbers,
    named_values,
    out_of_its_graph,
    whole_number,
)

MAX_RECORD_BYTES = 64 * 1024 * 1024
"""Largest stored turn: a reader must hold several in memory."""

MAX_LOGPROB = 1e-3
"""A log-probability is at most 0, but sampling engines round."""

ATTEMPT_LIMIT = 1000
"""Attempts of one sample: the scripts that decide a group look at each of them."""

MAX_LABELS = 64
"""Tags, and metrics, of one trajectory: the planner keeps those of every trajectory that waits."""

MAX_LABEL_BYTES = 128
"""Longest name of a tag or a metric, in UTF-8."""

MAX_TAG_BYTES = 256
"""Longest value of a tag, in UTF-8: a label, not a text."""

_TOKEN_ID_LIMIT = 2**31
_NUMBER_LIMIT = 2**31  # of samples
_VERSION_LIMIT = 2**63
_UNSIGNED = {4: np.uint32, 8: np.uint64}  # by size in bytes

_Choice = TypeVar("_Choice", bound=StrEnum)

# Half the price of array.max() and array.min() for arrays as short as a turn.
_largest = np.maximum.reduce
_least = np.minimum.reduce


def checked_turn(
    prompt_ids: Any,
    response_ids: Any,
    *,
    logprobs: Any = None,
    loss_mask: Any = None,
    rewards: Any = None,
    policy_version: int | None = None,
    version_runs: Sequence[VersionRun] = (),
    anchor: Anchor | None = None,
    allow_empty: bool = False,
) -> Turn:
    """Return a turn of arrays that fit each other, from lists, numpy arrays or torch tensors.

    Args:
        prompt_ids: (P,) whole numbers, every token that the model saw.
        response_ids: (R,) whole numbers, the sampled tokens.
        logprobs: (R,) in nats; None if there are none. Values where `loss_mask` is 0 become 0.0.
        loss_mask: (R,) of 0 and 1 or booleans; None trains every response token.
        rewards: (R,); None for none.
        policy_version: the version of the weights that sampled all of the response.
        version_runs: (version, num_tokens) of each part, if several versions sampled it.
        anchor: the state that the turn began in; its hash is kept.
        allow_empty: accept a response without tokens.

    Raises:
        InvalidTurnError: something does not fit.
    """
    allow_empty = flag(allow_empty, field="allow_empty")
    prompt = token_ids(prompt_ids, field="prompt_ids")
    response = token_ids(response_ids, field="response_ids")
    if len(prompt) == 0:
        raise InvalidTurnError("prompt_ids", "is empty; a model call sees at least one token")
    if len(response) == 0 and not allow_empty:
        raise InvalidTurnError("response_ids", "is empty; say allow_empty=True if that is meant")
    mask = None if loss_mask is None else _mask(loss_mask, num_tokens=len(response))
    return Turn(
        prompt_ids=prompt,
        response_ids=response,
        logprobs=None if logprobs is None else _logprobs(logprobs, mask, num_tokens=len(response)),
        loss_mask=mask,
        rewards=None if rewards is None else _rewards(rewards, num_tokens=len(response)),
        version_runs=_version_runs(policy_version, version_runs, num_tokens=len(response)),
        anchor=anchor_hash(anchor),
    )


def recheck_turn(turn: Turn) -> Turn:
    """Return the same turn, its arrays checked; an empty response is taken as meant."""
    if not isinstance(turn, Turn):
        raise InvalidTurnError("turn", f"{shown(turn)} is not a Turn")
    return checked_turn(
        turn.prompt_ids,
        turn.response_ids,
        logprobs=turn.logprobs,
        loss_mask=turn.loss_mask,
        rewards=turn.rewards,
        version_runs=turn.version_runs,
        anchor=turn.anchor,
        allow_empty=True,
    )


def check_key(key: TrajectoryKey, *, num_samples: int | None) -> None:
    """Refuse a key that no group of `num_samples` has; None stands for a group of any size."""
    checked_name(key.group_id, field="group_id")
    _whole_number(key.sample, field="sample")
    _whole_number(key.attempt, field="attempt", limit=ATTEMPT_LIMIT)
    if num_samples is not None and key.sample >= num_samples:
        raise InvalidTurnError("sample", f"{key.sample} in a group of {num_samples}, from 0")


def check_group(group_id: str, *, num_samples: int, num_needed: int | None = None) -> None:
    """Refuse a group that cannot be; `num_needed` None stands for all samples."""
    checked_name(group_id, field="group_id")
    _whole_number(num_samples, field="num_samples", least=1)
    if num_samples > LARGEST_GROUP:
        raise InvalidTurnError(
            "num_samples",
            f"{num_samples} is above {LARGEST_GROUP}, the most that the setting max_samples of a "
            "run allows",
        )
    if num_needed is not None:
        _whole_number(num_needed, field="num_needed", least=1)
        if num_needed > num_samples:
            raise InvalidTurnError("num_needed", f"{num_needed} of {num_samples} samples")


def checked_purpose(purpose: Purpose | str, *, num_samples: int, num_needed: int | None) -> Purpose:
    """Return the purpose of a group; an evaluation has no `num_needed`, which would bias it."""
    checked = _choice(Purpose, purpose, field="purpose")
    if checked is Purpose.EVAL and num_needed not in {None, num_samples}:
        raise InvalidTurnError(
            "num_needed", f"{num_needed} of {num_samples} samples: an evaluation counts them all"
        )
    return checked


def checked_group(group: Group) -> list[Trajectory]:
    """Return the trajectories of a whole group in order of their samples."""
    if not isinstance(group, Group):
        raise InvalidTurnError("group", f"{shown(group)} is not a Group")
    members = group.trajectories
    check_list_of(members, Trajectory, field="trajectories")
    samples = sorted(_whole_number(each.sample, field="sample") for each in members)
    check_group(group.group_id, num_samples=len(samples))
    if samples != list(range(len(samples))):
        raise InvalidTurnError("sample", f"{samples} are not 0 to {len(samples) - 1}, each once")
    return sorted(members, key=operator.attrgetter("sample"))


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
            "reward", f"{shown(reward)} is given, but awaits_reward says that it comes later"
        )
    return None if reward is None else finite_number(reward, field="reward")


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return named finite numbers, ordered by name."""
    numbers = named_numbers(metrics, field="metrics")
    _check_labels(numbers, field="metrics")
    for name, number in numbers.items():
        if abs(number) > MAX_METRIC:
            raise InvalidTurnError(f"metrics[{name!r}]", f"{number!r} is beyond {MAX_METRIC:g}")
    return numbers


def checked_tags(tags: Mapping[str, str] | None) -> dict[str, str]:
    """Return named labels, ordered by name."""
    named = named_values(tags, field="tags")
    for name, text in named.items():
        checked_text(text, field=f"tags[{name!r}]")
        _check_size(text, field=f"tags[{name!r}]", most=MAX_TAG_BYTES)
    _check_labels(named, field="tags")
    return dict(sorted(named.items()))


def _check_labels(values: Mapping[str, Any], *, field: str) -> None:
    if len(values) > MAX_LABELS:
        raise InvalidTurnError(field, f"has {len(values)} names, more than {MAX_LABELS}")
    for name in values:
        if not name:
            raise InvalidTurnError(field, f"has an empty name, of {values[name]!r}")
        _check_size(name, field=field, most=MAX_LABEL_BYTES)


def _check_size(text: str, *, field: str, most: int) -> None:
    num_bytes = len(text.encode())
    if num_bytes > most:
        raise InvalidTurnError(field, f"{text[:32]!r}... has {num_bytes} bytes, more than {most}")


def checked_status(status: Status | str) -> Status:
    """Return one of the ways in which an episode can end."""
    return _choice(Status, status, field="status")


def _choice(kind: type[_Choice], value: object, *, field: str) -> _Choice:
    try:
        return kind(value)
    except (ValueError, TypeError) as error:
        choices = ", ".join(kind)
        raise InvalidTurnError(field, f"{shown(value)} is not one of {choices}") from error


def token_ids(values: Any, *, field: str) -> NDArray[np.int32]:
    """int32 (N,), from 0 to 2^31 - 1; the caller's own array where that is possible."""
    array = _row(values, field=field)
    if array.dtype.kind not in "iu":
        if len(array) == 0:  # a list without elements says nothing of their type
            return np.empty(0, np.int32)
        raise InvalidTurnError(
            field, f"are whole numbers, not {array.dtype}: {shown(array[0])} at 0"
        )
    if array.dtype.itemsize < 4 or not array.dtype.isnative:
        array = array.astype(np.int64)
    # Read as unsigned, negative numbers are the largest: one pass over the tokens in place of two.
    if len(array) and _largest(array.view(_UNSIGNED[array.itemsize])) >= _TOKEN_ID_LIMIT:
        wrong = (array < 0) | (array >= _TOKEN_ID_LIMIT)
        raise _at_first(field, array, wrong, "is not a token id (0 to 2^31 - 1)")
    return np.ascontiguousarray(array, dtype=np.int32)


def _mask(values: Any, *, num_tokens: int) -> NDArray[np.uint8] | None:
    array = _per_token(values, field="loss_mask", kinds="biuf", num_tokens=num_tokens)
    if array.dtype == np.bool_:
        return np.ascontiguousarray(array).view(np.uint8)
    is_small = array.dtype == np.uint8 and (not len(array) or _largest(array) <= 1)
    if not is_small:
        wrong = (array != 0) & (array != 1)
        if wrong.any():
            raise _at_first("loss_mask", array, wrong, "is neither 0 nor 1")
    return np.ascontiguousarray(array, dtype=np.uint8)


def _logprobs(
    values: Any, mask: NDArray[np.uint8] | None, *, num_tokens: int
) -> NDArray[np.float32]:
    array = _per_token(values, field="logprobs", kinds="iuf", num_tokens=num_tokens)
    logprobs = _as_float32(array)
    if mask is not None:
        logprobs = np.where(mask.view(np.bool_), logprobs, np.float32(0))
    # Both comparisons are false where there is a NaN.
    if len(logprobs) and not (_largest(logprobs) <= MAX_LOGPROB and _least(logprobs) > -math.inf):
        wrong = ~np.isfinite(logprobs) | (logprobs > MAX_LOGPROB)
        raise _at_first("logprobs", array, wrong, "is not a finite number of at most 0")
    return logprobs


def _rewards(values: Any, *, num_tokens: int) -> NDArray[np.float32]:
    array = _per_token(
        out_of_its_graph(values), field="rewards", kinds="biuf", num_tokens=num_tokens
    )
    rewards = _as_float32(array)
    wrong = ~np.isfinite(rewards)
    if wrong.any():
        raise _at_first("rewards", array, wrong, "is not a finite float32")
    return rewards


def _version_runs(
    policy_version: int | None, runs: Iterable[VersionRun], *, num_tokens: int
) -> tuple[VersionRun, ...]:
    runs = _listed_runs(runs)
    if policy_version is not None:
        if runs:
            raise InvalidTurnError(
                "policy_version", f"{shown(policy_version)} and version_runs are both present"
            )
        number = _whole_number(policy_version, field="policy_version", limit=_VERSION_LIMIT)
        return (VersionRun(number, num_tokens),) if num_tokens else ()
    num_covered = sum(run.num_tokens for run in runs)
    if runs and num_covered != num_tokens:
        raise InvalidTurnError(
            "version_runs", f"cover {num_covered} tokens, response_ids has {num_tokens}"
        )
    return runs


def _listed_runs(given: Iterable[VersionRun]) -> tuple[VersionRun, ...]:
    """Return version runs, each of a version or None and a number of tokens."""
    runs: list[VersionRun] = []
    try:
        listed = [VersionRun(*run) for run in given]
    except TypeError as error:
        message = f"{shown(given)} is no list of (version, num_tokens)"
        raise InvalidTurnError("version_runs", message) from error
    for position, (version, num_tokens) in enumerate(listed):
        name = f"version_runs[{position}]"
        if version is not None:
            version = _whole_number(version, field=f"{name}.version", limit=_VERSION_LIMIT)
        runs.append(
            VersionRun(version, _whole_number(num_tokens, field=f"{name}.num_tokens", least=1))
        )
    return tuple(runs)


def check_list_of(values: object, kind: type[object], *, field: str) -> None:
    """Refuse a value that is no sequence of objects of one type."""
    given = cast("Sequence[object]", values)
    if not isinstance(values, Sequence) or not all(isinstance(each, kind) for each in given):
        raise InvalidTurnError(field, f"{shown(values)} is not a list of {kind.__name__}")


def _as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    if array.dtype == np.float32:
        return np.ascontiguousarray(array)
    with np.errstate(over="ignore"):  # too large values become infinite, and are refused
        return np.ascontiguousarray(array, dtype=np.float32)


def _per_token(values: Any, *, field: str, kinds: str, num_tokens: int) -> NDArray[Any]:
    array = _row(values, field=field)
    if len(array) != num_tokens:
        raise InvalidTurnError(field, f"has {len(array)} values, response_ids has {num_tokens}")
    if array.dtype.kind not in kinds and len(array):
        raise InvalidTurnError(field, f"are numbers, not {array.dtype}: {shown(array[0])} at 0")
    return array


def as_array(values: Any, *, field: str) -> NDArray[Any]:
    """Return any array of numbers, from a list, a numpy array or a torch tensor."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        # RuntimeError: a torch tensor that is part of a graph.
        raise InvalidTurnError(field, f"is no array of numbers: {error}") from error


def _row(values: Any, *, field: str) -> NDArray[Any]:
    array = as_array(values, field=field)
    if array.ndim != 1:
        message = f"has the shape {array.shape}, not one dimension: {shown(values)}"
        raise InvalidTurnError(field, message)
    return array


def _at_first(
    field: str, array: NDArray[Any], wrong: NDArray[np.bool_], message: str
) -> InvalidTurnError:
    position = int(np.argmax(wrong))
    return InvalidTurnError(field, f"{array[position].item()!r} at position {position} {message}")


def _whole_number(value: Any, *, field: str, least: int = 0, limit: int = _NUMBER_LIMIT) -> int:
    return whole_number(value, field=field, least=least, limit=limit)
