"""Turns from chat completions and completions of OpenAI-compatible servers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from turnstream.errors import InvalidTurnError
from turnstream.responses.fields import (
    Column,
    chosen,
    field_at,
    field_of,
    first_column,
    is_unfinished,
    list_of,
    prompt_of,
)
from turnstream.responses.logprobs import checked_logprobs
from turnstream.responses.outcomes import TurnArguments, routes_of, runs_of, turn_arguments
from turnstream.responses.streams import whole_response
from turnstream.types.names import quoted

_TOKEN_ID: Final = re.compile(r"token_id:([0-9]+)")

_SEND_IDS: Final = (
    "send return_token_ids=true with the request (openai package: "
    'extra_body={"return_token_ids": True})'
)
_SEND_LOGPROBS: Final = (
    "send logprobs=true with a chat request, logprobs=1 with a completion, without echo=true"
)


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
    response = whole_response(response)
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
    """Return the sampled tokens and their log-probabilities."""
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
