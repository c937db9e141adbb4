"""Turns from responses of inference engines: vLLM's outputs and OpenAI-compatible servers.

vLLM and the openai package are not imported. A response is any object, or its plain JSON, with
these fields. The shapes are those of vLLM 0.33 and SGLang 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypedDict

from turnstream.errors import InvalidTurnError
from turnstream.types.names import shown
from turnstream.types.scalars import finite_number

__all__ = ["TurnArguments", "from_openai", "from_vllm"]

_NO_LOGPROB: Final = -9999.0
"""Servers write this, or less, where a token has no log-probability: JSON has no infinity."""

_SUM_TOLERANCE: Final = 1e-5
"""Relative: the same floats, which another order of addition rounds differently."""

_TOKEN_ID: Final = re.compile(r"token_id:([0-9]+)")

_SEND_IDS: Final = (
    "send return_token_ids=true with the request (openai package: "
    'extra_body={"return_token_ids": True})'
)
_SEND_LOGPROBS: Final = "send logprobs=true with a chat request, logprobs=1 with a completion"
_SAMPLE_LOGPROBS: Final = "sample with SamplingParams(logprobs=0), or more than 0"
_WHOLE_OUTPUT: Final = "take the last output, with output_kind CUMULATIVE or FINAL_ONLY"


class TurnArguments(TypedDict):
    """Arguments of `TrajectoryWriter.append` that a response of an engine determines.

    Attributes:
        prompt_ids: token ids of the whole prompt that the model saw.
        response_ids: the sampled tokens.
        logprobs: one per response token, in nats, as the engine computed them.
    """

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
    chosen = _chosen(output, among="outputs", index=index)
    completion, path = chosen.source, chosen.path
    if _is_unfinished(completion):
        raise InvalidTurnError(
            f"{path}finish_reason",
            f"is None: the request is still running; {_WHOLE_OUTPUT}",
        )
    prompt = _prompt(
        prompt_ids,
        {"prompt_token_ids": _field(output, "prompt_token_ids")},
        remedy="give the RequestOutput, or prompt_ids=",
    )
    response = _listed(_required(completion, "token_ids", path), field=f"{path}token_ids")
    logprobs = _vllm_logprobs(
        _field(completion, "logprobs"), response_ids=response, field=f"{path}logprobs"
    )
    _check_sum(logprobs, _field(completion, "cumulative_logprob"), path=path)
    return TurnArguments(prompt_ids=prompt, response_ids=response, logprobs=logprobs)


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
    chosen = _chosen(response, among="choices", index=index)
    choice, path = chosen.source, chosen.path
    _check_not_streamed(choice, path)
    extension = _field(response, "sglext")
    prompt = _prompt(
        prompt_ids,
        {
            f"{path}prompt_token_ids": _field(choice, "prompt_token_ids"),
            "prompt_token_ids": _field(response, "prompt_token_ids"),
            "sglext.input_ids": _field(extension, "input_ids"),
        },
        remedy=f"{_SEND_IDS} and give the whole response, or give prompt_ids=",
    )
    columns = _logprob_columns(_field(choice, "logprobs"), path=path)
    ids_field, ids = _response_ids(chosen, extension, columns)
    logprobs = _openai_logprobs(columns, response_ids=ids, ids_field=ids_field)
    return TurnArguments(prompt_ids=prompt, response_ids=ids, logprobs=logprobs)


class _Chosen(NamedTuple):
    """One output or choice, its position, and its path in errors, which ends in a dot or is ""."""

    source: Any
    path: str
    position: int


class _LogprobColumns(NamedTuple):
    """Texts and log-probabilities of the response tokens; None where the server returned none."""

    texts: list[Any] | None
    text_field: str
    values: list[Any] | None
    value_field: str


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


def _prompt(given: Iterable[int] | None, found: Mapping[str, Any], *, remedy: str) -> list[int]:
    """Return the prompt of the response, or else that of the caller."""
    stated = _first_stated(found)
    if stated is None:
        if given is None:
            raise InvalidTurnError("prompt_token_ids", f"is missing: {remedy}")
        return _listed(given, field="prompt_ids")
    field, value = stated
    prompt = _listed(value, field=field)
    if given is not None and _listed(given, field="prompt_ids") != prompt:
        raise InvalidTurnError(
            "prompt_ids", f"differs from {field}, the {len(prompt)} tokens that the model saw"
        )
    return prompt


def _vllm_logprobs(logprobs: Any, *, response_ids: list[int], field: str) -> list[float]:
    """Return the log-probability of each sampled token, out of those of its candidates."""
    if logprobs is None:
        if response_ids:
            raise InvalidTurnError(field, f"is None: {_SAMPLE_LOGPROBS}")
        return []
    is_flat = _field(logprobs, "start_indices") is not None
    candidates = logprobs if is_flat else _listed(logprobs, field=field)
    if len(candidates) != len(response_ids):
        raise InvalidTurnError(
            field,
            f"has {len(candidates)} values, token_ids has {len(response_ids)}; {_WHOLE_OUTPUT}",
        )
    sampled = _sampled_of_flat if is_flat else _sampled_of_list
    return [
        _checked(
            sampled(candidates, position, token_id),
            field=f"{field}[{position}]",
            remedy=f"token {token_id} has none; {_SAMPLE_LOGPROBS}",
        )
        for position, token_id in enumerate(response_ids)
    ]


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


def _sampled_of_list(candidates: list[Any], position: int, token_id: int) -> Any:
    """Return the log-probability of the sampled token in a mapping of candidates, or None."""
    mapping = candidates[position]
    entry = mapping.get(token_id) if isinstance(mapping, Mapping) else None
    return _field(entry, "logprob")


def _sampled_of_flat(candidates: Any, position: int, token_id: int) -> Any:
    """Return the same of a FlatLogprobs, without an object per candidate."""
    for at in range(candidates.start_indices[position], candidates.end_indices[position]):
        if candidates.token_ids[at] == token_id:
            return candidates.logprobs[at]
    return None


def _response_ids(
    chosen: _Chosen, extension: Any, columns: _LogprobColumns
) -> tuple[str, list[int]]:
    """Return the sampled tokens, and the field that has them."""
    choice, path = chosen.source, chosen.path
    stated = _first_stated(
        {
            f"{path}token_ids": _field(choice, "token_ids"),
            f"{path}response_token_ids": _field(choice, "response_token_ids"),
            f"sglext.output_ids[{chosen.position}]": _output_ids(extension, chosen.position),
        }
    ) or _first_stated({columns.text_field: _ids_of_texts(columns)})
    if stated is None:
        raise InvalidTurnError(f"{path}token_ids", f"is missing: {_SEND_IDS}")
    return stated[0], _listed(stated[1], field=stated[0])


def _output_ids(extension: Any, position: int) -> Any:
    """Return the response that SGLang's extension has for the choice at a position."""
    rows = _field(extension, "output_ids")
    if rows is None:
        return None
    listed = _listed(rows, field="sglext.output_ids")
    if position >= len(listed):
        raise InvalidTurnError(
            "sglext.output_ids", f"has {len(listed)} responses, and none for choices[{position}]"
        )
    return listed[position]


def _ids_of_texts(columns: _LogprobColumns) -> list[int] | None:
    """Return token ids out of texts of the form `token_id:123`; None where they are real texts."""
    texts = columns.texts or []
    found = [_TOKEN_ID.fullmatch(text) if isinstance(text, str) else None for text in texts]
    matches = [match for match in found if match is not None]
    if not matches:
        return None
    if len(matches) < len(texts):
        position = found.index(None)
        raise InvalidTurnError(
            columns.text_field,
            f"{shown(texts[position])} at position {position} has not the form token_id:123 of "
            f"others; {_SEND_IDS}",
        )
    return [int(match[1]) for match in matches]


def _logprob_columns(logprobs: Any, *, path: str) -> _LogprobColumns:
    """Return the columns of a chat completion (`content`) or of a completion (`tokens`)."""
    content = _field(logprobs, "content")
    if content is not None:
        field = f"{path}logprobs.content"
        entries = _listed(content, field=field)
        texts = [_field(entry, "token") for entry in entries]
        return _LogprobColumns(texts, field, [_field(entry, "logprob") for entry in entries], field)
    field = f"{path}logprobs"
    texts, values = _field(logprobs, "tokens"), _field(logprobs, "token_logprobs")
    if values is None:
        return _LogprobColumns(None, field, None, field)
    text_field, value_field = f"{field}.tokens", f"{field}.token_logprobs"
    listed = None if texts is None else _listed(texts, field=text_field)
    return _LogprobColumns(listed, text_field, _listed(values, field=value_field), value_field)


def _openai_logprobs(
    columns: _LogprobColumns, *, response_ids: list[int], ids_field: str
) -> list[float]:
    """Return one log-probability per response token."""
    field, values = columns.value_field, columns.values
    if values is None:
        if response_ids:
            raise InvalidTurnError(field, f"is missing: {_SEND_LOGPROBS}")
        return []
    if len(values) != len(response_ids):
        raise InvalidTurnError(
            field,
            f"has {len(values)} values, {ids_field} has {len(response_ids)}; send the request "
            "without echo=true and stream=true",
        )
    return [
        _checked(
            value,
            field=f"{field}[{position}]",
            remedy=f"{_SEND_LOGPROBS}, without echo=true",
        )
        for position, value in enumerate(values)
    ]


def _checked(value: Any, *, field: str, remedy: str) -> float:
    """Return a finite log-probability; `append` checks that it is at most 0."""
    if value is None:
        raise InvalidTurnError(field, f"is missing: {remedy}")
    number = finite_number(value, field=field)
    if number <= _NO_LOGPROB:
        raise InvalidTurnError(
            field, f"{number!r} is what servers write for a token without a log-probability"
        )
    return number


def _first_stated(found: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the first field that has a value, and its value."""
    return next(((field, value) for field, value in found.items() if value is not None), None)


def _required(source: Any, name: str, path: str) -> Any:
    value = _field(source, name)
    if value is None:
        raise InvalidTurnError(f"{path}{name}", "is missing")
    return value


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
