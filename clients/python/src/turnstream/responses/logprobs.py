"""Log-probabilities of sampled tokens, in the forms of the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from turnstream.errors import InvalidTurnError
from turnstream.responses.fields import Column, field_of
from turnstream.types.scalars import finite_number

WHOLE_OUTPUT: Final = "take the last output, with output_kind CUMULATIVE or FINAL_ONLY"

_NO_LOGPROB: Final = -9999.0
"""Servers write this, or less, where a token has no log-probability: JSON has no infinity."""

_SUM_TOLERANCE: Final = 1e-5
"""Relative: the same floats, which another order of addition rounds differently."""


def _value_at(values: list[Any], position: int, _: int) -> Any:
    return values[position]


def checked_logprobs(
    column: tuple[str, Any],
    ids: Column,
    *,
    if_missing: str,
    if_partial: str,
    sampled: Callable[[Any, int, int], Any] = _value_at,
) -> list[float]:
    """Return a finite log-probability per token; `append` checks that it is at most 0.

    Args:
        column: field of the log-probabilities, and its content, or None.
        ids: field of the sampled tokens, and the tokens.
        if_missing: remedy of a missing value.
        if_partial: remedy where the lengths differ.
        sampled: return the value of a token out of the content, its position and its id.
    """
    field, content = column
    ids_field, token_ids = ids
    if content is None:
        if token_ids:
            raise InvalidTurnError(field, f"is missing: {if_missing}")
        return []
    if len(content) != len(token_ids):
        raise InvalidTurnError(
            field, f"has {len(content)} values, {ids_field} has {len(token_ids)}; {if_partial}"
        )
    logprobs: list[float] = []
    for position, token_id in enumerate(token_ids):
        place, value = f"{field}[{position}]", sampled(content, position, token_id)
        if value is None:
            raise InvalidTurnError(place, f"is missing: token {token_id} has none; {if_missing}")
        number = finite_number(value, field=place)
        if number <= _NO_LOGPROB:
            raise InvalidTurnError(
                place, f"{number!r} is what servers write for a token without a log-probability"
            )
        logprobs.append(number)
    return logprobs


def sampled_of_list(candidates: list[Any], position: int, token_id: int) -> Any:
    """Return the log-probability of the sampled token in a mapping of candidates, or None."""
    mapping = candidates[position]
    return field_of(mapping.get(token_id) if isinstance(mapping, Mapping) else None, "logprob")


def sampled_of_flat(candidates: Any, position: int, token_id: int) -> Any:
    """Return the same of a FlatLogprobs, without an object per candidate."""
    for at in range(candidates.start_indices[position], candidates.end_indices[position]):
        if candidates.token_ids[at] == token_id:
            return candidates.logprobs[at]
    return None


def check_sum(logprobs: list[float], expected: Any, *, path: str) -> None:
    """Refuse the last output of a stream of deltas: only its sum is of all tokens."""
    if not isinstance(expected, int | float):
        return
    actual = sum(logprobs)
    if abs(actual - expected) > _SUM_TOLERANCE * max(1.0, abs(expected)):
        raise InvalidTurnError(
            f"{path}cumulative_logprob",
            f"{expected!r} is not the sum of {path}logprobs, {actual!r}: tokens are missing; "
            f"{WHOLE_OUTPUT}",
        )
