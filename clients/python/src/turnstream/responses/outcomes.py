"""The end of a response, its versions and its router choices, as arguments of `append`."""

from __future__ import annotations

import base64
import binascii
import io
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import InvalidTurnError
from turnstream.responses.fields import Column, field_of
from turnstream.types import Status, VersionRun
from turnstream.types.names import quoted

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
