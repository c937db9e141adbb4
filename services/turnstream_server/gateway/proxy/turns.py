"""Turns out of the answer of an engine to one model call: pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from turnstream.errors import InvalidTurnError
from turnstream.generator.encode.checks import checked_turn
from turnstream.responses import from_openai
from turnstream.types import Status
from turnstream_server.gateway.proxy.call_ids import call_id
from turnstream_server.gateway.rest.ingest.writes import WrittenTurn

_WHOLE: Final = (Status.COMPLETED, Status.TRUNCATED)
_ADAPTER: Final = re.compile(r".*-v([0-9]{1,18})")
"""Name of the adapter of one version, as a trainer gives it to inference servers."""


class IncompleteError(Exception):
    """The answer of an engine is not whole, so that no token of it is trained.

    `may_repeat`: the same call may have a whole one.
    """

    def __init__(self, reason: str, *, may_repeat: bool = True) -> None:
        super().__init__(reason)
        self.may_repeat = may_repeat


def turns_of(
    response: Mapping[str, Any], *, call: str, model: str, newest_version: int | None
) -> list[WrittenTurn]:
    """Return the turn of each choice of a response, in their order.

    Args:
        response: the JSON of a response, of a stream that of its joined chunks.
        call: name of the call.
        model: name of the model that the engine sampled from.
        newest_version: version of the weights when the call was sent, for a response without one.

    Raises:
        IncompleteError: a choice was aborted, lacks token ids or log-probabilities, or has another
            number of tokens than `usage` says.
    """
    named = adapter_version(model)
    version = newest_version if named is None else named
    try:
        turns = [
            _turn(response, index=choice["index"], call=call, version=version)
            for choice in response["choices"]
        ]
    except InvalidTurnError as error:
        raise IncompleteError(str(error), may_repeat=False) from error
    _check_usage(response.get("usage") or {}, turns)
    return turns


def num_tokens_of(response: Mapping[str, Any]) -> int:
    """Return the sampled tokens of all choices, as far as the response has their ids.

    >>> num_tokens_of({"choices": [{"token_ids": [1, 2]}, {"index": 1}]})
    2
    """
    return sum([len(choice.get("token_ids") or ()) for choice in response["choices"]])


def adapter_version(model: str) -> int | None:
    """Return the version in the name of an adapter.

    >>> adapter_version("demo-v7"), adapter_version("demo")
    (7, None)
    """
    found = _ADAPTER.fullmatch(model)
    return None if found is None else int(found[1])


def _turn(
    response: Mapping[str, Any], *, index: int, call: str, version: int | None
) -> WrittenTurn:
    found: dict[str, Any] = {**from_openai(response, index=index, policy_version=version)}
    status = Status(found.pop("status"))
    if status not in _WHOLE:
        reasons = {each["index"]: each.get("finish_reason") for each in response["choices"]}
        raise IncompleteError(f"choice {index} has ended with {reasons[index]!r}")
    return WrittenTurn(checked_turn(**found, call_id=call_id(call, index)), None)


def _check_usage(usage: Mapping[str, Any], turns: Sequence[WrittenTurn]) -> None:
    numbers = {
        "completion_tokens": sum([len(each.turn.response_ids) for each in turns]),
        "prompt_tokens": len(turns[0].turn.prompt_ids) if turns else 0,
    }
    for name, found in numbers.items():
        said = usage.get(name)
        if isinstance(said, int) and said != found:
            raise IncompleteError(f"usage.{name} is {said}, and the answer has {found} token ids")
