"""Turns from chat completions and completions of OpenAI-compatible servers, streamed or not."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, Iterable, Iterator
from typing import Any, Final

from turnstream.errors import InvalidTurnError
from turnstream.responses.fields import (
    Column,
    TurnArguments,
    checked_logprobs,
    chosen,
    field_at,
    field_of,
    first_column,
    is_unfinished,
    list_of,
    prompt_of,
    routes_of,
    runs_of,
    turn_arguments,
)
from turnstream.types.names import quoted

_TOKEN_ID: Final = re.compile(r"token_id:([0-9]+)")

_SEND_IDS: Final = (
    "send return_token_ids=true with the request (openai package: "
    'extra_body={"return_token_ids": True})'
)
_SEND_LOGPROBS: Final = (
    "send logprobs=true with a chat request, logprobs=1 with a completion, without echo=true"
)

_OF_RESPONSE: Final = ("prompt_token_ids", "prompt_routed_experts", "sglext", "metadata", "usage")
_OF_CHOICE: Final = (
    "finish_reason",
    "weight_versions",
    "routed_experts",
    "prompt_token_ids",
    "meta_info",
)
_IDS: Final = ("token_ids", "response_token_ids")
_OF_ENTRY: Final = ("token", "logprob")
_LOGPROBS: Final = ("content", "tokens", "token_logprobs")


def from_openai(
    response: Any,
    *,
    index: int | None = None,
    prompt_ids: Iterable[int] | None = None,
    policy_version: int | None = None,
    routed_experts: str | None = None,
) -> TurnArguments:
    """Return the arguments of `append` for one choice of an OpenAI-compatible server.

    `writer.append(**turnstream.from_openai(response, policy_version=7))`

    Args:
        response: a chat completion or completion, one of its choices, or all chunks of a stream:
            objects of the openai package, or their JSON. vLLM has the prompt of a chat completion
            at the response, not at the choice.
        index: number of the choice to take, where the response has several (n > 1).
        prompt_ids: token ids of the prompt, where the server returned none. They must equal those
            of the response where it has them.
        policy_version: version of the weights, for a response that does not name it.
        routed_experts: name of the extra column for the router choices; None leaves them out.

    Raises:
        InvalidTurnError: names the field that is missing or does not fit, and the option to set.
    """
    response = _whole_response(response)
    choice, path, position = chosen(response, among="choices", index=index)
    _check_not_streamed(choice, path)
    prompt = prompt_of(
        prompt_ids,
        first_column(
            (path, choice, "prompt_token_ids"),
            ("", response, "prompt_token_ids"),
            ("", response, "sglext.input_ids"),
        ),
        remedy=f"{_SEND_IDS} and give the whole response, or give prompt_ids=",
    )
    ids, logprobs = _sampled(response, choice, path=path, position=position)
    num_tokens = len(prompt) + len(ids)
    return turn_arguments(
        prompt,
        ids,
        logprobs,
        reason=field_of(choice, "finish_reason"),
        version_runs=runs_of(
            first_column(
                (path, choice, "weight_versions"), (path, choice, "meta_info.weight_versions")
            ),
            [
                field_at(choice, "meta_info.weight_version"),
                field_at(response, "metadata.weight_version"),
                field_at(response, "meta_info.weight_version"),
            ],
            given=policy_version,
            num_tokens=len(ids),
        ),
        extras=routes_of(
            routed_experts, _routes(response, choice, path, position), num_tokens=num_tokens
        ),
    )


def _sampled(
    response: Any, choice: Any, *, path: str, position: int
) -> tuple[list[int], list[float]]:
    content = first_column((path, choice, "logprobs.content"))
    if content is not None:  # a chat completion has them
        field, entries = content
        texts = field, [field_of(entry, "token") for entry in entries]
        values = field, [field_of(entry, "logprob") for entry in entries]
    else:
        texts = first_column((path, choice, "logprobs.tokens"))
        values = first_column((path, choice, "logprobs.token_logprobs"))
    ids = (
        first_column((path, choice, "token_ids"), (path, choice, "response_token_ids"))
        or _ids_of_extension(response, position)
        or _ids_of_texts(texts)
    )
    if ids is None:
        raise InvalidTurnError(f"{path}token_ids", f"is missing: {_SEND_IDS}")
    logprobs = checked_logprobs(
        values or (f"{path}logprobs", None),
        ids,
        if_missing=_SEND_LOGPROBS,
        if_partial="send the request without echo=true, and give all chunks of a stream",
    )
    return ids[1], logprobs


def _routes(response: Any, choice: Any, path: str, position: int) -> list[tuple[str, Any]]:
    """Return the fields with router choices, those of the prompt first where they are apart."""
    prompt = ("prompt_routed_experts", field_of(response, "prompt_routed_experts"))
    for field, source, name in (
        (f"{path}routed_experts", choice, "routed_experts"),
        (f"{path}meta_info.routed_experts", choice, "meta_info.routed_experts"),
    ):
        if (value := field_at(source, name)) is not None:
            return [prompt, (field, value)]
    value = field_at(response, "sglext.routed_experts")
    if isinstance(value, list | tuple) and value and isinstance(value[0], str):
        value = value[position] if position < len(value) else None
    return [prompt, ("sglext.routed_experts", value)] if value is not None else []


def _check_not_streamed(choice: Any, path: str) -> None:
    if field_of(choice, "delta") is None and not is_unfinished(choice):
        return
    field = "finish_reason" if field_of(choice, "delta") is None else "delta"
    raise InvalidTurnError(
        f"{path}{field}",
        f"{quoted(field_of(choice, field))} belongs to a chunk of a stream, which holds a part "
        "of the response; give a list of all chunks, or send stream=false",
    )


def _ids_of_extension(response: Any, position: int) -> Column | None:
    """Return the response that SGLang's extension has for the choice at a position."""
    rows = first_column(("", response, "sglext.output_ids"))
    if rows is None:
        return None
    field, listed = rows
    if position >= len(listed):
        raise InvalidTurnError(
            field, f"has {len(listed)} responses, and none for choices[{position}]"
        )
    field = f"{field}[{position}]"
    return field, list_of(listed[position], field=field)


def _ids_of_texts(column: Column | None) -> Column | None:
    """Return token ids out of texts of the form `token_id:123`; None where they are real texts."""
    if column is None:
        return None
    field, texts = column
    found = [_TOKEN_ID.fullmatch(text) if isinstance(text, str) else None for text in texts]
    matches = [match for match in found if match is not None]
    if not matches:
        return None
    if len(matches) < len(texts):
        position = found.index(None)
        raise InvalidTurnError(
            field,
            f"{quoted(texts[position])} at position {position} has not the form token_id:123 of "
            f"others; {_SEND_IDS}",
        )
    return field, [int(match[1]) for match in matches]


def _whole_response(response: Any) -> Any:
    """Return the chunks of a stream as the JSON of one response; a response as it is."""
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
    joined = JoinedStream()
    for chunk in chunks:
        joined.add(chunk)
    return joined.response()


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


class JoinedStream:
    """The chunks of a stream as the JSON of one response, without texts and other candidates."""

    def __init__(self) -> None:
        self._choices: dict[Any, dict[str, Any]] = {}
        self._response: dict[str, Any] = {}
        self._num_chunks = 0

    def add(self, chunk: Any) -> None:
        """Add the next chunk."""
        self._num_chunks += 1
        _take_last(self._response, chunk, _OF_RESPONSE)
        for part in field_of(chunk, "choices"):
            number = field_of(part, "index") or 0
            choice = self._choices.setdefault(number, {"index": number, "finish_reason": None})
            _take_last(choice, part, _OF_CHOICE)
            _extend(choice, part, _IDS)
            if (logprobs := field_of(part, "logprobs")) is not None:
                _extend(choice.setdefault("logprobs", {}), logprobs, _LOGPROBS)

    def response(self) -> dict[str, Any]:
        """Return the response; InvalidTurnError if a choice has no end, or lacks tokens."""
        for number, choice in self._choices.items():
            if choice["finish_reason"] is None:
                raise InvalidTurnError(
                    f"choices[{number}].finish_reason",
                    f"is in none of the {self._num_chunks} chunks: the stream has ended early",
                )
        choices = [choice for _, choice in sorted(self._choices.items())]
        response = self._response | {"choices": choices}
        _check_usage(response)
        return response


def _take_last(target: dict[str, Any], source: Any, names: tuple[str, ...]) -> None:
    """Take the fields that a chunk has; the last chunk that has one decides."""
    target.update({name: value for name in names if (value := field_of(source, name)) is not None})


def _extend(target: dict[str, Any], source: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if (values := field_of(source, name)) is None:
            continue
        entries = list_of(values, field=name)
        if name == "content":  # the entries have the texts of all candidates too
            entries = [{each: field_of(entry, each) for each in _OF_ENTRY} for entry in entries]
        target.setdefault(name, []).extend(entries)


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
