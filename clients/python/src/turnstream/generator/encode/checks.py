"""Validation of a turn and of its extra columns, before it is sent.

Pure functions. Every error names the field, the value and its position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.config.declarations import field_of, require_declared
from turnstream.batching.merge.merging import anchor_hash
from turnstream.errors import InvalidTurnError
from turnstream.types import Anchor, DeclaredColumn, StoredTurn, Turn, VersionRun
from turnstream.types.names import (
    call_id_trouble,
    finite_number,
    flag,
    named_values,
    out_of_its_graph,
    quoted,
    whole_number,
)

MAX_RECORD_BYTES: Final = 8 << 20
"""Largest stored turn, by whatever way it comes. The store runs no other command while it copies
one, about 4 ms per MB."""

MAX_LOGPROB: Final = 1e-3
"""A log-probability is at most 0, but sampling engines round."""

_LARGEST_FLOAT32: Final = float(np.finfo(np.float32).max)
_TOKEN_ID_LIMIT: Final = 2**31
_VERSION_LIMIT: Final = 2**63
_INT32: Final = np.dtype(np.int32)
_FLOAT32: Final = np.dtype(np.float32)
_UINT8: Final = np.dtype(np.uint8)
_UNSIGNED: Final = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}  # by size in bytes
_EXTRA_KINDS: Final = {"u": "biu", "i": "biu", "f": "iuf"}
"""Kinds of numbers that a column of whole numbers, and of floats, accepts."""

# Half the price of array.max() and array.min() for arrays as short as a turn.
_largest = np.maximum.reduce
_least = np.minimum.reduce


def checked_turn(
    prompt_ids: Any,
    response_ids: Any,
    *,
    logprobs: Any = None,
    loss_mask: Any = None,
    token_weights: Any = None,
    rewards: Any = None,
    reward: Any = None,
    policy_version: int | None = None,
    version_runs: Sequence[VersionRun] = (),
    anchor: Anchor | None = None,
    call_id: str | None = None,
    allow_empty: bool = False,
) -> Turn:
    """Return a turn of arrays that fit each other, from lists, numpy arrays or torch tensors.

    The arguments are those of `TrajectoryWriter.append`. Log-probabilities and weights where
    `loss_mask` is 0 become 0.0, and the anchor becomes its hash.
    """
    allow_empty = flag(allow_empty, field="allow_empty")
    prompt = _token_ids(prompt_ids, field="prompt_ids")
    response = _token_ids(response_ids, field="response_ids")
    if len(prompt) == 0:
        raise InvalidTurnError("prompt_ids", "is empty; a model call sees at least one token")
    if len(response) == 0 and not allow_empty:
        raise InvalidTurnError("response_ids", "is empty; say allow_empty=True if that is meant")
    num_tokens = len(response)
    mask = weights = None
    if loss_mask is not None or token_weights is not None:
        mask, weights = _mask_and_weights(loss_mask, token_weights, num_tokens=num_tokens)
    if logprobs is not None:
        logprobs = _logprobs(logprobs, mask, num_tokens=num_tokens)
    if rewards is not None or reward is not None:
        rewards = _rewards(rewards, reward, num_tokens=num_tokens)
    if call_id is not None and (trouble := call_id_trouble(call_id)):
        raise InvalidTurnError("call_id", trouble)
    return Turn(
        prompt_ids=prompt,
        response_ids=response,
        logprobs=logprobs,
        loss_mask=mask,
        rewards=rewards,
        token_weights=weights,
        version_runs=_version_runs(policy_version, version_runs, num_tokens=num_tokens),
        anchor=None if anchor is None else anchor_hash(anchor),
        call_id=call_id,
    )


def with_checked_extras(
    turn: Turn, extras: Mapping[str, Any] | None, declared: Sequence[DeclaredColumn]
) -> Turn:
    """Return the turn with these columns, as arrays of the declared types and shapes.

    A column is a list, numpy array or torch tensor; None for a missing one.
    """
    named = named_values(extras, field="extras")
    if not declared and not named:
        return turn
    columns = {column.name: column for column in declared}
    arrays = {
        name: _extra(columns[name], values) if name in columns else np.empty(0)
        for name, values in sorted(named.items())
        if values is not None
    }
    require_declared(
        arrays, declared, num_prompt=len(turn.prompt_ids), num_response=len(turn.response_ids)
    )
    return replace(turn, extras=arrays)


def check_record(record: bytes, turn: StoredTurn) -> None:
    """Refuse the record of a turn above MAX_RECORD_BYTES, and name its largest field.

    >>> turn = StoredTurn(
    ...     index=0, parent_turn=-1, shared_tokens=0, num_response_tokens=2,
    ...     token_ids=np.arange(8, dtype=np.int32),
    ... )
    >>> check_record(bytes(100), turn)
    >>> check_record(bytes(MAX_RECORD_BYTES + 1), turn)  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    turnstream.errors.InvalidTurnError: turn: is a record of 8388609 bytes, more than 8388608, with
    32 of token ids: append it as several turns, each of which extends the one before
    """
    if len(record) <= MAX_RECORD_BYTES:
        return
    arrays = {
        "token ids": turn.token_ids,
        "logprobs": turn.logprobs,
        "rewards": turn.rewards,
        "token_weights": turn.token_weights,
        **{f"extras[{name!r}]": piece.values for name, piece in turn.extras.items()},
    }
    sizes = {name: 0 if each is None else each.nbytes for name, each in arrays.items()}
    largest = max(sizes, key=sizes.__getitem__)
    remedy = "append it as several turns, each of which extends the one before"
    if largest.startswith("extras"):
        remedy += ", or declare a smaller dtype"
    raise InvalidTurnError(
        "turn",
        f"is a record of {len(record)} bytes, more than {MAX_RECORD_BYTES}, with "
        f"{sizes[largest]} of {largest}: {remedy}",
    )


def _token_ids(values: Any, *, field: str) -> NDArray[np.int32]:
    """Return int32 (N,), from 0 to 2^31 - 1; the caller's own array where that is possible."""
    array = _row(values, field=field)
    if array.dtype != _INT32:
        if array.dtype.kind not in "iu":
            if len(array) == 0:  # a list without elements says nothing of their type
                return np.empty(0, np.int32)
            raise InvalidTurnError(
                field, f"are whole numbers, not {array.dtype}: {quoted(array[0])} at 0"
            )
        if array.dtype.itemsize < 4 or not array.dtype.isnative:
            array = array.astype(np.int64)
    # Read as unsigned, negative numbers are the largest: one pass over the tokens in place of two.
    if len(array) and _largest(array.view(_UNSIGNED[array.itemsize])) >= _TOKEN_ID_LIMIT:
        wrong = (array < 0) | (array >= _TOKEN_ID_LIMIT)
        raise _at_first(field, array, wrong, "is not a token id (0 to 2^31 - 1)")
    return np.ascontiguousarray(array, dtype=_INT32)


def _mask_and_weights(
    loss_mask: Any, token_weights: Any, *, num_tokens: int
) -> tuple[NDArray[np.uint8] | None, NDArray[np.float32] | None]:
    """Return mask and weights; a mask of fractions is both: its trained tokens are those above 0.

    For loss_mask 0.25 1.0 0.0, the mask is 1 1 0 and the weights are 0.25 1.0 0.0.
    """
    mask = fractions = None
    if loss_mask is not None:
        array = _per_token(loss_mask, field="loss_mask", kinds="biuf", num_tokens=num_tokens)
        fractions = _fractions(array)
        mask = _mask(array) if fractions is None else (fractions > 0).view(np.uint8)
    if token_weights is None:
        return mask, fractions
    if fractions is not None:
        message = f"are present, and loss_mask has fractions: {quoted(loss_mask)}"
        raise InvalidTurnError("token_weights", message)
    return mask, _weights(token_weights, mask, num_tokens=num_tokens)


def _mask(array: NDArray[Any]) -> NDArray[np.uint8]:
    if array.dtype == np.bool_:
        return np.ascontiguousarray(array).view(_UINT8)
    return np.ascontiguousarray(array, dtype=_UINT8)


def _fractions(array: NDArray[Any]) -> NDArray[np.float32] | None:
    """Return the values of a mask with numbers between 0 and 1; None if it has only 0 and 1."""
    is_small = array.dtype == _UINT8 and (not len(array) or _largest(array) <= 1)
    if is_small or array.dtype == np.bool_:
        return None
    wrong = (array != 0) & (array != 1)
    if not wrong.any():
        return None
    wrong = ~((array >= 0) & (array <= 1))
    if wrong.any():
        raise _at_first("loss_mask", array, wrong, "is neither 0 nor 1, nor between them")
    return _as_floats(array, _FLOAT32)


def _weights(
    values: Any, mask: NDArray[np.uint8] | None, *, num_tokens: int
) -> NDArray[np.float32]:
    array = _per_token(
        out_of_its_graph(values), field="token_weights", kinds="biuf", num_tokens=num_tokens
    )
    weights = _as_floats(array, _FLOAT32)
    if mask is not None:
        weights = np.where(mask, weights, np.float32(0))
    wrong = ~((weights >= 0) & (weights < math.inf))
    if wrong.any():
        raise _at_first("token_weights", array, wrong, "is not a finite float32 of at least 0")
    return weights


def _logprobs(
    values: Any, mask: NDArray[np.uint8] | None, *, num_tokens: int
) -> NDArray[np.float32]:
    array = _per_token(values, field="logprobs", kinds="iuf", num_tokens=num_tokens)
    logprobs = _as_floats(array, _FLOAT32)
    if mask is not None:
        # All bits times 1, or times 0: five times as fast as a choice for each token.
        logprobs = np.multiply(logprobs.view(_UNSIGNED[4]), mask).view(_FLOAT32)
    # Both comparisons are false where there is a NaN.
    if len(logprobs) and not (_largest(logprobs) <= MAX_LOGPROB and _least(logprobs) > -math.inf):
        wrong = ~np.isfinite(logprobs) | (logprobs > MAX_LOGPROB)
        raise _at_first("logprobs", array, wrong, "is not a finite number of at most 0")
    return logprobs


def _rewards(values: Any, of_turn: Any, *, num_tokens: int) -> NDArray[np.float32]:
    """Return a reward per token; the one of the whole turn belongs to its last token.

    For 3 tokens and a reward of 0.5 for the turn: 0.0 0.0 0.5.
    """
    if of_turn is not None:
        return _reward_of_turn(of_turn, is_alone=values is None, num_tokens=num_tokens)
    array = _per_token(
        out_of_its_graph(values), field="rewards", kinds="biuf", num_tokens=num_tokens
    )
    return _finite(array, np.float32, field="rewards")


def _reward_of_turn(reward: Any, *, is_alone: bool, num_tokens: int) -> NDArray[np.float32]:
    number = finite_number(reward, field="reward")
    if not is_alone:
        raise InvalidTurnError("reward", f"{number!r} and rewards are both present")
    if num_tokens == 0:
        raise InvalidTurnError("reward", f"{number!r} has no token: response_ids is empty")
    if abs(number) > _LARGEST_FLOAT32:
        raise InvalidTurnError("reward", f"{number!r} is more than a float32 can hold")
    rewards = np.zeros(num_tokens, np.float32)
    rewards[-1] = number
    return rewards


def _version_runs(
    policy_version: int | None, runs: Iterable[VersionRun], *, num_tokens: int
) -> tuple[VersionRun, ...]:
    runs = () if type(runs) is tuple and not runs else _listed_runs(runs)
    if policy_version is not None:
        if runs and {run.version for run in runs} != {policy_version}:
            raise InvalidTurnError(
                "policy_version", f"{quoted(policy_version)} and version_runs are both present"
            )
        number = whole_number(policy_version, field="policy_version", limit=_VERSION_LIMIT)
        return (VersionRun(number, num_tokens),) if num_tokens else ()
    num_covered = sum([run.num_tokens for run in runs])
    if runs and num_covered != num_tokens:
        raise InvalidTurnError(
            "version_runs", f"cover {num_covered} tokens, response_ids has {num_tokens}"
        )
    return runs


def _listed_runs(given: Iterable[VersionRun]) -> tuple[VersionRun, ...]:
    runs: list[VersionRun] = []
    try:
        listed = [VersionRun(*run) for run in given]
    except TypeError as error:
        message = f"{quoted(given)} is no list of (version, num_tokens)"
        raise InvalidTurnError("version_runs", message) from error
    for position, run in enumerate(listed):
        version, num_tokens = run
        is_known = type(version) is int and 0 <= version < _VERSION_LIMIT
        if is_known and type(num_tokens) is int and 0 < num_tokens < 2**31:  # most runs
            runs.append(run)
            continue
        name = f"version_runs[{position}]"
        if version is not None:
            version = whole_number(version, field=f"{name}.version", limit=_VERSION_LIMIT)
        num_tokens = whole_number(num_tokens, field=f"{name}.num_tokens", least=1, limit=2**31)
        runs.append(VersionRun(version, num_tokens))
    return tuple(runs)


def _extra(column: DeclaredColumn, values: Any) -> NDArray[Any]:
    field = field_of(column)
    array = _as_array(values, field=field)
    if column.per == "row" and array.shape == column.shape:
        array = array[None]
    if array.shape == (0,):  # a list without elements says nothing of their type and shape
        array = np.empty((0, *column.shape), column.dtype)
    if column.per == "first_tokens" and array.shape[1:] == (math.prod(column.shape),):
        array = array.reshape(len(array), *column.shape)  # SGLang does not name layers and k
    if array.ndim != 1 + len(column.shape) or array.shape[1:] != column.shape:
        expected = ", ".join(["n", *map(str, column.shape)])
        message = f"has the shape {array.shape}, not ({expected}): {quoted(values)}"
        raise InvalidTurnError(field, message)
    kind = column.numpy_dtype.kind
    if array.dtype.kind not in _EXTRA_KINDS[kind]:
        message = f"are numbers for {column.dtype}, not {array.dtype}: {quoted(values)}"
        raise InvalidTurnError(field, message)
    if kind == "f":
        return _finite(array, column.dtype, field=field)
    limits = np.iinfo(column.dtype)
    least = 0 if column.per == "first_tokens" else limits.min
    if array.size and not (least <= int(array.min()) and int(array.max()) <= limits.max):
        wrong = np.array([not least <= int(one) <= limits.max for one in array.flat])
        what = "an expert" if column.per == "first_tokens" else f"an {column.dtype}"
        message = f"is not {what} ({least} to {limits.max})"
        raise _at_first(field, array, wrong.reshape(array.shape), message)
    return array.astype(column.dtype, copy=False)


def _per_token(values: Any, *, field: str, kinds: str, num_tokens: int) -> NDArray[Any]:
    array = _row(values, field=field)
    if len(array) != num_tokens:
        raise InvalidTurnError(field, f"has {len(array)} values, response_ids has {num_tokens}")
    if array.dtype.kind not in kinds and len(array):
        raise InvalidTurnError(field, f"are numbers, not {array.dtype}: {quoted(array[0])} at 0")
    return array


def _row(values: Any, *, field: str) -> NDArray[Any]:
    if type(values) is np.ndarray and values.ndim == 1:
        return values
    array = _as_array(values, field=field)
    if array.ndim != 1:
        message = f"has the shape {array.shape}, not one dimension: {quoted(values)}"
        raise InvalidTurnError(field, message)
    return array


def _as_array(values: Any, *, field: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        # RuntimeError: a torch tensor that is part of a graph.
        raise InvalidTurnError(field, f"is no array of numbers: {error}") from error


def _as_floats(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    with np.errstate(over="ignore"):  # too large values become infinite, and are refused
        return np.ascontiguousarray(array, dtype=dtype)


def _finite(array: NDArray[Any], dtype: Any, *, field: str) -> NDArray[Any]:
    floats = _as_floats(array, dtype)
    is_finite = np.isfinite(floats)
    if not is_finite.all():
        raise _at_first(field, array, ~is_finite, f"is not a finite {np.dtype(dtype)}")
    return floats


def _at_first(
    field: str, array: NDArray[Any], wrong: NDArray[np.bool_], message: str
) -> InvalidTurnError:
    place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    where = f"position {place[0]}" if len(place) == 1 else f"position {[*map(int, place)]}"
    return InvalidTurnError(field, f"{array[place].item()!r} at {where} {message}")
