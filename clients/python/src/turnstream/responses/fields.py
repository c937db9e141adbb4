"""Fields of a response, which is an object or its plain JSON, and its log-probabilities."""

from __future__ import annotations

import base64
import binascii
import io
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import InvalidTurnError
from turnstream.types import Status, VersionRun
from turnstream.types.names import finite_number, quoted

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
    """Return the first column with values; a place is a path for errors, an object and a name."""
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
    if type(source) is dict or isinstance(source, Mapping):  # the first is much faster
        return source.get(name)
    return getattr(source, name, None)


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

    `sampled` returns the value of a token out of the content of the column, its position and id.
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


_STATUSES: Final = {
    "stop": Status.COMPLETED,
    "tool_calls": Status.COMPLETED,
    "function_call": Status.COMPLETED,
    "length": Status.TRUNCATED,
    "repetition": Status.TRUNCATED,
    "abort": Status.ABORTED,
    "error": Status.ERROR,
    "content_filter": Status.ERROR,
}
"""Status of a turn by the `finish_reason` of its response."""

_VERSION: Final = re.compile(r"v?([0-9]{1,18})")

_SEND_ROUTES: Final = "start the server with --enable-return-routed-experts; SGLang also needs \
return_routed_experts=true in the request"

_logger = logging.getLogger(__name__)
_unknown_reasons: set[str] = set()


class TurnArguments(TypedDict):
    """Arguments of `TrajectoryWriter.append` that a response of an engine determines.

    Attributes:
        status: "completed", "truncated", "aborted" or "error".
        version_runs: the versions that sampled the response, where they are known.
        extras: the router choices, where they were asked for.
        allow_empty: True where the response has no token.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    status: str
    version_runs: NotRequired[list[VersionRun]]
    extras: NotRequired[dict[str, Any]]
    allow_empty: NotRequired[bool]


def turn_arguments(
    prompt: list[int],
    response: list[int],
    logprobs: list[float],
    *,
    reason: Any,
    version_runs: list[VersionRun],
    extras: dict[str, Any] | None = None,
) -> TurnArguments:
    """Return the arguments of a turn whose response ended with `reason`.

    A response without tokens is accepted. Its status is never "completed".
    """
    status = status_of(reason)
    if not response and status is Status.COMPLETED:
        status = Status.TRUNCATED
    turn = TurnArguments(
        prompt_ids=prompt, response_ids=response, logprobs=logprobs, status=status.value
    )
    if version_runs and response:
        turn["version_runs"] = version_runs
    if extras:
        turn["extras"] = extras
    if not response:
        turn["allow_empty"] = True
    return turn


def status_of(reason: Any) -> Status:
    """Return the status of a turn from the `finish_reason` of an engine.

    An unknown reason is an error, so that its response is not trained by default.

    >>> [status_of(reason).value for reason in ("stop", "length", "abort", {"type": "error"}, None)]
    ['completed', 'truncated', 'aborted', 'error', 'completed']
    """
    name = field_of(reason, "type") if isinstance(reason, Mapping) else reason
    if name is None:
        return Status.COMPLETED
    status = _STATUSES.get(str(name))
    if status is not None:
        return status
    if str(name) not in _unknown_reasons and len(_unknown_reasons) < len(_STATUSES):
        _unknown_reasons.add(str(name))
        _logger.warning(
            "finish_reason %s is unknown: its turns have the status 'error'. Known are %s",
            *(quoted(name), ", ".join(_STATUSES)),
        )
    return Status.ERROR


def version_of(label: Any) -> int | None:
    """Return the number in the label of a version; None where it has none.

    >>> [version_of(label) for label in (7, "7", "v7", "default", None)]
    [7, 7, 7, None, None]
    """
    match = None if isinstance(label, bool) else _VERSION.fullmatch(str(label))
    return None if match is None else int(match[1])


def runs_of(
    spans: Column | None, labels: Sequence[Any], *, given: int | None, num_tokens: int
) -> list[VersionRun]:
    """Return the versions that sampled a response; empty if they are unknown.

    They are those of its parts, `spans` with `version`, `start` and `end`. Else the first label of
    the whole response that has a number is taken, else the version of the caller.
    """
    if spans is not None and spans[1]:
        runs = _runs_of_spans(*spans, num_tokens=num_tokens)
        if any(run.version is not None for run in runs):
            return runs
    version = next((found for found in map(version_of, labels) if found is not None), given)
    return [] if version is None else [VersionRun(version, num_tokens)]


def _runs_of_spans(field: str, spans: list[Any], *, num_tokens: int) -> list[VersionRun]:
    """Return a run for each span; tokens between spans have no version."""
    runs: list[VersionRun] = []
    position = 0
    for number, span in enumerate([*spans, {"start": num_tokens, "end": num_tokens}]):
        start, end = field_of(span, "start"), field_of(span, "end")
        is_range = isinstance(start, int) and isinstance(end, int)
        if not is_range or not position <= start <= end <= num_tokens:
            raise InvalidTurnError(
                f"{field}[{number}]",
                f"{quoted(span)} is no part of {num_tokens} tokens after token {position}",
            )
        runs.append(VersionRun(None, start - position))
        runs.append(VersionRun(version_of(field_of(span, "version")), end - start))
        position = end
    return [run for run in runs if run.num_tokens]


def routes_of(
    column: str | None, parts: Sequence[tuple[str, Any]], *, num_tokens: int
) -> dict[str, Any] | None:
    """Return the router choices of a turn as its extra column; None without a `column`.

    `parts` are fields of the response and their values; those of the prompt come first. The last of
    the `num_tokens` tokens of prompt and response has no choice.
    """
    if column is None:
        return None
    found = [(field, value) for field, value in parts if value is not None]
    if not found:
        raise InvalidTurnError("routed_experts", f"is missing: {_SEND_ROUTES}")
    field = found[-1][0]
    arrays = [_routes(value, field=name, num_rows=num_tokens - 1) for name, value in found]
    try:
        routes = np.concatenate(arrays)
    except ValueError as error:
        raise InvalidTurnError(field, f"does not fit to {found[0][0]}: {error}") from error
    if len(routes) not in (num_tokens - 1, num_tokens):
        raise InvalidTurnError(
            field,
            f"has the choices of {len(routes)} tokens, not of all but the last of {num_tokens}",
        )
    return {column: routes}


def _routes(value: Any, *, field: str, num_rows: int) -> NDArray[Any]:
    """Return router choices (tokens, layers, k), or (tokens, layers x k) for SGLang.

    A text is the base64 form of a file of numpy (vLLM), or of int32 numbers (SGLang).
    """
    try:
        if not isinstance(value, str):
            return np.asarray(value)
        data = base64.b64decode(value, validate=True)
        if data.startswith(b"\x93NUMPY"):
            return np.load(io.BytesIO(data), allow_pickle=False)
        return np.frombuffer(data, "<i4").reshape(num_rows, -1)
    except (ValueError, TypeError, binascii.Error) as error:
        message = f"{quoted(value)} has no router choices of {num_rows} tokens: {error}"
        raise InvalidTurnError(field, message) from error
