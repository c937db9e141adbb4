"""Turns from responses of inference engines: vLLM, OpenAI-compatible servers, the Tinker API.

Their packages are not imported. A response is any object, or its plain JSON, with
these fields. The shapes are those of vLLM 0.33 and SGLang 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypedDict

from turnstream.errors import InvalidTurnError
from turnstream.types.names import shown
from turnstream.types.scalars import finite_number

__all__ = ["TurnArguments", "from_openai", "from_tinker", "from_vllm"]

_NO_LOGPROB: Final = -9999.0
"""Servers write this, or less, where a token has no log-probability: JSON has no infinity."""

_SUM_TOLERANCE: Final = 1e-5
"""Relative: the same floats, which another order of addition rounds differently."""

_TOKEN_ID: Final = re.compile(r"token_id:([0-9]+)")

_SEND_IDS: Final = (
    "send return_token_ids=true with the request (openai package: "
    'extra_body={"return_token_ids": True})'
)
_SEND_LOGPROBS: Final = (
    "send logprobs=true with a chat request, logprobs=1 with a completion, without echo=true"
)
_SAMPLE_LOGPROBS: Final = "sample with SamplingParams(logprobs=0), or more than 0"
_WHOLE_OUTPUT: Final = "take the last output, with output_kind CUMULATIVE or FINAL_ONLY"

_Column = tuple[str, list[Any]]
"""A field of a response, by its path, and its values."""


class TurnArguments(TypedDict):
    """Arguments of `TrajectoryWriter.append` that a response of an engine determines."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]


def from_vllm(
    output: Any, *, index: int | None = None, prompt_ids: Iterable[int] | None = None
) -> TurnArguments:
    """Return the arguments of `append` for one output of vLLM.

    `writer.append(**turnstream.from_vllm(output), policy_version=7)`

    Args:
        output: a finished RequestOutput, or one of its `outputs` together with `prompt_ids`. Its
            log-probabilities are a list of mappings or a FlatLogprobs. The last output of a stream
            of deltas (output_kind DELTA) is refused: it holds only a part of the response.
        index: number of the output to take, where the request sampled several (n > 1).
        prompt_ids: token ids of the prompt, where `output` has none. They must equal those of
            `output` where it has them.

    Raises:
        InvalidTurnError: names the field that is missing or does not fit, and the option to set.
    """
    completion, path, _ = _chosen(output, among="outputs", index=index)
    if _is_unfinished(completion):
        raise InvalidTurnError(
            f"{path}finish_reason",
            f"is None: the request is still running; {_WHOLE_OUTPUT}",
        )
    prompt = _prompt(
        prompt_ids,
        _first_column(("", output, "prompt_token_ids")),
        remedy="give the RequestOutput, or prompt_ids=",
    )
    response = _first_column((path, completion, "token_ids"))
    if response is None:
        raise InvalidTurnError(f"{path}token_ids", "is missing")
    candidates = _field(completion, "logprobs")
    is_flat = _field(candidates, "start_indices") is not None
    if candidates is not None and not is_flat:
        candidates = _listed(candidates, field=f"{path}logprobs")
    logprobs = _logprobs(
        (f"{path}logprobs", candidates),
        response,
        sampled=_sampled_of_flat if is_flat else _sampled_of_list,
        if_missing=_SAMPLE_LOGPROBS,
        if_partial=_WHOLE_OUTPUT,
    )
    _check_sum(logprobs, _field(completion, "cumulative_logprob"), path=path)
    return TurnArguments(prompt_ids=prompt, response_ids=response[1], logprobs=logprobs)


def from_openai(
    response: Any, *, index: int | None = None, prompt_ids: Iterable[int] | None = None
) -> TurnArguments:
    """Return the arguments of `append` for one choice of an OpenAI-compatible server.

    `writer.append(**turnstream.from_openai(response), policy_version=7)`

    Args:
        response: a chat completion or completion that was not streamed, or one of its choices: the
            object of the openai package, or its JSON. vLLM has the prompt of a chat completion at
            the response, not at the choice.
        index: number of the choice to take, where the response has several (n > 1).
        prompt_ids: token ids of the prompt, where the server returned none. They must equal those
            of the response where it has them.

    Raises:
        InvalidTurnError: names the field that is missing or does not fit, and the option to set.
    """
    choice, path, position = _chosen(response, among="choices", index=index)
    _check_not_streamed(choice, path)
    prompt = _prompt(
        prompt_ids,
        _first_column(
            (path, choice, "prompt_token_ids"),
            ("", response, "prompt_token_ids"),
            ("", response, "sglext.input_ids"),
        ),
        remedy=f"{_SEND_IDS} and give the whole response, or give prompt_ids=",
    )
    content = _first_column((path, choice, "logprobs.content"))
    if content is not None:  # a chat completion has them
        field, entries = content
        texts = field, [_field(entry, "token") for entry in entries]
        values = field, [_field(entry, "logprob") for entry in entries]
    else:
        texts = _first_column((path, choice, "logprobs.tokens"))
        values = _first_column((path, choice, "logprobs.token_logprobs"))
    ids = (
        _first_column((path, choice, "token_ids"), (path, choice, "response_token_ids"))
        or _ids_of_extension(response, position)
        or _ids_of_texts(texts)
    )
    if ids is None:
        raise InvalidTurnError(f"{path}token_ids", f"is missing: {_SEND_IDS}")
    logprobs = _logprobs(
        values or (f"{path}logprobs", None),
        ids,
        if_missing=_SEND_LOGPROBS,
        if_partial="send the request without echo=true and stream=true",
    )
    return TurnArguments(prompt_ids=prompt, response_ids=ids[1], logprobs=logprobs)


def from_tinker(response: Any, *, prompt: Any, index: int | None = None) -> TurnArguments:
    """Return the arguments of `append` for one sequence of a sampling client of the tinker SDK.

    `writer.append(**turnstream.from_tinker(response, prompt=prompt), policy_version=7)`

    Sample with temperature 1: the log-probabilities are those of the distribution after the
    temperature.

    Args:
        response: a SampleResponse, or one of its sequences.
        prompt: the ModelInput that was sampled from, or its token ids. The response has none.
        index: number of the sequence to take, where the request sampled several.

    Raises:
        InvalidTurnError: names the field that is missing or does not fit.
    """
    sequence, path, _ = _chosen(response, among="sequences", index=index)
    to_ints = getattr(prompt, "to_ints", None)
    prompt_ids = _listed(to_ints() if callable(to_ints) else prompt, field="prompt")
    ids = _first_column((path, sequence, "tokens"))
    if ids is None:
        raise InvalidTurnError(f"{path}tokens", "is missing")
    values = _first_column((path, sequence, "logprobs")) or (f"{path}logprobs", None)
    remedy = "take the SampleResponse of a sampling client"
    logprobs = _logprobs(values, ids, if_missing=remedy, if_partial=remedy)
    return TurnArguments(prompt_ids=prompt_ids, response_ids=ids[1], logprobs=logprobs)


class _Chosen(NamedTuple):
    """One output or choice, its path in errors, which ends in a dot or is "", its position."""

    source: Any
    path: str
    position: int


def _chosen(source: Any, *, among: str, index: int | None) -> _Chosen:
    """Return the output or choice that `index` names; the only one where it is None."""
    if source is None or isinstance(source, str | bytes | int | float | Sequence):
        raise InvalidTurnError(
            among, f"cannot be read from {shown(source)}; give one response, or one of its {among}"
        )
    listed = _field(source, among)
    alone = listed is None
    members = [source] if alone else _listed(listed, field=among)
    if not members:
        raise InvalidTurnError(among, "is empty")
    numbers = [_field(member, "index") for member in members]
    if not all(isinstance(each, int) for each in numbers) or len(set(numbers)) < len(numbers):
        numbers = list(range(len(members)))
    if index is None and len(members) > 1:
        raise InvalidTurnError(
            "index", f"is None, but {among} has {len(members)}: name one of {numbers}"
        )
    if index is not None and index not in numbers:
        raise InvalidTurnError("index", f"{shown(index)} is not in {among}, which has {numbers}")
    position = 0 if index is None else numbers.index(index)
    return _Chosen(members[position], "" if alone else f"{among}[{position}].", position)


def _check_not_streamed(choice: Any, path: str) -> None:
    if _field(choice, "delta") is None and not _is_unfinished(choice):
        return
    field = "finish_reason" if _field(choice, "delta") is None else "delta"
    raise InvalidTurnError(
        f"{path}{field}",
        f"{shown(_field(choice, field))} belongs to a chunk of a stream, which holds only a part "
        "of the response; send stream=false",
    )


def _is_unfinished(choice: Any) -> bool:
    """Whether an output or choice says that tokens are still to come."""
    if isinstance(choice, Mapping):
        return "finish_reason" in choice and choice["finish_reason"] is None
    return hasattr(choice, "finish_reason") and choice.finish_reason is None


def _prompt(given: Iterable[int] | None, stated: _Column | None, *, remedy: str) -> list[int]:
    """Return the prompt of the response, or else that of the caller."""
    own = None if given is None else _listed(given, field="prompt_ids")
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


def _check_sum(logprobs: list[float], expected: Any, *, path: str) -> None:
    """Refuse the last output of a stream of deltas: only its sum is of all tokens."""
    if not isinstance(expected, int | float):
        return
    actual = sum(logprobs)
    if abs(actual - expected) > _SUM_TOLERANCE * max(1.0, abs(expected)):
        raise InvalidTurnError(
            f"{path}cumulative_logprob",
            f"{expected!r} is not the sum of {path}logprobs, {actual!r}: tokens are missing; "
            f"{_WHOLE_OUTPUT}",
        )


def _value_at(values: list[Any], position: int, _: int) -> Any:
    return values[position]


def _sampled_of_list(candidates: list[Any], position: int, token_id: int) -> Any:
    """Return the log-probability of the sampled token in a mapping of candidates, or None."""
    mapping = candidates[position]
    return _field(mapping.get(token_id) if isinstance(mapping, Mapping) else None, "logprob")


def _sampled_of_flat(candidates: Any, position: int, token_id: int) -> Any:
    """Return the same of a FlatLogprobs, without an object per candidate."""
    for at in range(candidates.start_indices[position], candidates.end_indices[position]):
        if candidates.token_ids[at] == token_id:
            return candidates.logprobs[at]
    return None


def _ids_of_extension(response: Any, position: int) -> _Column | None:
    """Return the response that SGLang's extension has for the choice at a position."""
    rows = _first_column(("", response, "sglext.output_ids"))
    if rows is None:
        return None
    field, listed = rows
    if position >= len(listed):
        raise InvalidTurnError(
            field, f"has {len(listed)} responses, and none for choices[{position}]"
        )
    field = f"{field}[{position}]"
    return field, _listed(listed[position], field=field)


def _ids_of_texts(column: _Column | None) -> _Column | None:
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
            f"{shown(texts[position])} at position {position} has not the form token_id:123 of "
            f"others; {_SEND_IDS}",
        )
    return field, [int(match[1]) for match in matches]


def _logprobs(
    column: tuple[str, Any],
    ids: _Column,
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


def _first_column(*places: tuple[str, Any, str]) -> _Column | None:
    """Return the first column that has values.

    Args:
        places: the path of an object in errors, the object, and a dotted name in it.
    """
    for path, source, name in places:
        values = source
        for part in name.split("."):
            values = _field(values, part)
        if values is not None:
            return f"{path}{name}", _listed(values, field=f"{path}{name}")
    return None


def _field(source: Any, name: str) -> Any:
    """Return a field of an object or of a JSON mapping; None where there is none."""
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _listed(values: Any, *, field: str) -> list[Any]:
    """Return a list, a tuple or an array of one dimension as a list."""
    listed: Any = values
    if callable(getattr(values, "tolist", None)):
        listed = values.tolist()
    elif isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        listed = list(values)
    if not isinstance(listed, list):
        raise InvalidTurnError(field, f"{shown(values)} is not a list")
    return listed
