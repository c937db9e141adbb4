"""Streamed responses: the chunks of an OpenAI-compatible server as one response."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterator
from typing import Any, Final

from turnstream.errors import InvalidTurnError
from turnstream.responses.fields import field_of, list_of
from turnstream.types.names import quoted

_OF_RESPONSE: Final = ("prompt_token_ids", "prompt_routed_experts", "sglext", "metadata", "usage")
_OF_CHOICE: Final = (
    "finish_reason",
    "weight_versions",
    "routed_experts",
    "prompt_token_ids",
    "meta_info",
)
_IDS: Final = ("token_ids", "response_token_ids")
_LOGPROBS: Final = ("content", "tokens", "token_logprobs")


def whole_response(response: Any) -> Any:
    """Return the chunks of a stream as the JSON of one response; a response as it is.

    Raises:
        InvalidTurnError: the response is one of the Responses API, is an error, is not finished, or
            has chunks of several responses.
    """
    if isinstance(response, AsyncIterable):
        raise InvalidTurnError(
            "choices", "cannot be read from an asynchronous stream: give a list of its chunks"
        )
    if not isinstance(response, list | tuple | Iterator):
        _refuse_other(response)
        return response
    chunks: list[Any] = list(response)
    for chunk in chunks:
        _refuse_other(chunk)
    if not chunks or any(not _is_chunk(chunk) for chunk in chunks):
        return chunks
    if len(names := {field_of(chunk, "id") for chunk in chunks}) > 1:
        raise InvalidTurnError("id", f"{quoted(sorted(map(str, names)))} are several responses")
    return _joined(chunks)


def _refuse_other(response: Any) -> None:
    kind = field_of(response, "object") or field_of(response, "type")
    if kind == "response" or (isinstance(kind, str) and kind.startswith("response.")):
        raise InvalidTurnError(
            "object",
            f"{kind!r} is of the Responses API, which returns no token ids: call "
            "client.chat.completions.create or client.completions.create",
        )
    if (error := field_of(response, "error")) or kind == "error":
        raise InvalidTurnError(
            "error", f"the server has answered with an error: {quoted(error or response)}"
        )


def _is_chunk(chunk: Any) -> bool:
    """Whether a value may be a chunk: a whole chat completion has a message."""
    choices = field_of(chunk, "choices")
    return choices is not None and all(field_of(each, "message") is None for each in choices)


def _joined(chunks: list[Any]) -> dict[str, Any]:
    choices: dict[Any, dict[str, Any]] = {}
    response: dict[str, Any] = {}
    for chunk in chunks:
        _take_last(response, chunk, _OF_RESPONSE)
        for part in field_of(chunk, "choices"):
            number = field_of(part, "index") or 0
            choice = choices.setdefault(number, {"index": number, "finish_reason": None})
            _take_last(choice, part, _OF_CHOICE)
            _extend(choice, part, _IDS)
            if (logprobs := field_of(part, "logprobs")) is not None:
                _extend(choice.setdefault("logprobs", {}), logprobs, _LOGPROBS)
    for number, choice in choices.items():
        if choice["finish_reason"] is None:
            raise InvalidTurnError(
                f"choices[{number}].finish_reason",
                f"is in none of the {len(chunks)} chunks: the stream has ended early",
            )
    response["choices"] = [choice for _, choice in sorted(choices.items())]
    _check_usage(response)
    return response


def _take_last(target: dict[str, Any], source: Any, names: tuple[str, ...]) -> None:
    """Take the fields that a chunk has; the last chunk that has one decides."""
    target.update({name: value for name in names if (value := field_of(source, name)) is not None})


def _extend(target: dict[str, Any], source: Any, names: tuple[str, ...]) -> None:
    """Append the values of a chunk to those of the chunks before."""
    for name in names:
        if (values := field_of(source, name)) is not None:
            target.setdefault(name, []).extend(list_of(values, field=name))


def _check_usage(response: dict[str, Any]) -> None:
    """Refuse a stream that lacks tokens, where its usage has their number."""
    number = field_of(response.get("usage"), "completion_tokens")
    choices = response["choices"]
    if not isinstance(number, int) or len(choices) != 1:
        return
    ids = choices[0].get("token_ids") or choices[0].get("response_token_ids")
    if ids is not None and len(ids) != number:
        raise InvalidTurnError(
            "usage.completion_tokens", f"is {number}, the chunks have {len(ids)} tokens"
        )
