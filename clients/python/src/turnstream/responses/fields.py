"""Fields of a response, which is an object or its plain JSON, and its log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from turnstream.errors import InvalidTurnError
from turnstream.types.names import quoted
from turnstream.types.scalars import finite_number

Column = tuple[str, list[Any]]
"""A field of a response, by its path, and its values."""

WHOLE_OUTPUT: Final = "take the last output, with output_kind CUMULATIVE or FINAL_ONLY"

_NO_LOGPROB: Final = -9999.0
"""Servers write this, or less, where a token has no log-probability: JSON has no infinity."""

_SUM_TOLERANCE: Final = 1e-5
"""Relative: the same floats, which another order of addition rounds differently."""


class Chosen(NamedTuple):
    """One output or choice, its path in errors, which ends in a dot or is "", its position."""

    source: Any
    path: str
    position: int


def chosen(source: Any, *, among: str, index: int | None) -> Chosen:
    """Return the output or choice that `index` names; the only one where it is None."""
    if source is None or isinstance(source, str | bytes | int | float | Sequence):
        raise InvalidTurnError(
            among, f"cannot be read from {quoted(source)}; give one response, or one of its {among}"
        )
    listed = field_of(source, among)
    alone = listed is None
    members = [source] if alone else list_of(listed, field=among)
    if not members:
        raise InvalidTurnError(among, "is empty")
    numbers = [field_of(member, "index") for member in members]
    if not all(isinstance(each, int) for each in numbers) or len(set(numbers)) < len(numbers):
        numbers = list(range(len(members)))
    if index is None and len(members) > 1:
        raise InvalidTurnError(
            "index", f"is None, but {among} has {len(members)}: name one of {numbers}"
        )
    if index is not None and index not in numbers:
        raise InvalidTurnError("index", f"{quoted(index)} is not in {among}, which has {numbers}")
    position = 0 if index is None else numbers.index(index)
    return Chosen(members[position], "" if alone else f"{among}[{position}].", position)


def is_unfinished(choice: Any) -> bool:
    """Whether an output or choice says that tokens are still to come."""
    if isinstance(choice, Mapping):
        return "finish_reason" in choice and choice["finish_reason"] is None
    return hasattr(choice, "finish_reason") and choice.finish_reason is None


def prompt_of(given: Iterable[int] | None, stated: Column | None, *, remedy: str) -> list[int]:
    """Return the prompt of the response, or else that of the caller."""
    own = None if given is None else list_of(given, field="prompt_ids")
    if stated is None:
        if own is None:
            raise InvalidTurnError("prompt_token_ids", f"is missing: {remedy}")
        return own
    field, prompt = stated
    if own is not None and own != prompt:
        raise InvalidTurnError(
            "prompt_ids", f"differs from {field}, the {len(prompt)} tokens that the model saw"
        )
    return prompt


def first_column(*places: tuple[str, Any, str]) -> Column | None:
    """Return the first column that has values.

    Args:
        places: the path of an object in errors, the object, and a dotted name in it.
    """
    for path, source, name in places:
        values = field_at(source, name)
        if values is not None:
            return f"{path}{name}", list_of(values, field=f"{path}{name}")
    return None


def field_at(source: Any, name: str) -> Any:
    """Return the field with a dotted name; None where there is none."""
    for part in name.split("."):
        source = field_of(source, part)
    return source


def field_of(source: Any, name: str) -> Any:
    """Return a field of an object or of a JSON mapping; None where there is none."""
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def list_of(values: Any, *, field: str) -> list[Any]:
    """Return a list, a tuple or an array of one dimension as a list."""
    listed: Any = values
    if callable(getattr(values, "tolist", None)):
        listed = values.tolist()
    elif isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        listed = list(values)
    if not isinstance(listed, list):
        raise InvalidTurnError(field, f"{quoted(values)} is not a list")
    return listed


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
