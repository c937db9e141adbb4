"""Turns from outputs of vLLM and SGLang, and from samples of the tinker SDK."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from turnstream.errors import InvalidTurnError
from turnstream.responses.fields import (
    WHOLE_OUTPUT,
    TurnArguments,
    check_sum,
    checked_logprobs,
    chosen,
    field_of,
    first_column,
    is_unfinished,
    list_of,
    prompt_of,
    routes_of,
    runs_of,
    sampled_of_flat,
    sampled_of_list,
    turn_arguments,
)

_SAMPLE_LOGPROBS: Final = "sample with SamplingParams(logprobs=0), or more than 0"
_RETURN_LOGPROB: Final = "send return_logprob=true with the request"


def from_vllm(
    output: Any,
    *,
    index: int | None = None,
    prompt_ids: Iterable[int] | None = None,
    policy_version: int | None = None,
    routed_experts: str | None = None,
) -> TurnArguments:
    """Return the arguments of `append` for one output of vLLM.

    `writer.append(**turnstream.from_vllm(output, policy_version=7))`

    Args:
        output: a finished RequestOutput, or one of its `outputs` together with `prompt_ids`. Its
            log-probabilities are a list of mappings or a FlatLogprobs. The last output of a stream
            of deltas (output_kind DELTA) is refused: it holds only a part of the response.
        index: number of the output to take, where the request sampled several (n > 1).
        prompt_ids: token ids of the prompt, where `output` has none. They must equal those of
            `output` where it has them.
        policy_version: version of the weights, for an output that does not name it.
        routed_experts: name of the extra column for the router choices; None leaves them out.

    Raises:
        InvalidTurnError: names the field that is missing or does not fit, and the option to set.
    """
    completion, path, _ = chosen(output, among="outputs", index=index)
    if is_unfinished(completion):
        raise InvalidTurnError(
            f"{path}finish_reason",
            f"is None: the request is still running; {WHOLE_OUTPUT}",
        )
    prompt = prompt_of(
        prompt_ids,
        first_column(("", output, "prompt_token_ids")),
        remedy="give the RequestOutput, or prompt_ids=",
    )
    response = first_column((path, completion, "token_ids"))
    if response is None:
        raise InvalidTurnError(f"{path}token_ids", "is missing")
    candidates = field_of(completion, "logprobs")
    is_flat = field_of(candidates, "start_indices") is not None
    if candidates is not None and not is_flat:
        candidates = list_of(candidates, field=f"{path}logprobs")
    logprobs = checked_logprobs(
        (f"{path}logprobs", candidates),
        response,
        sampled=sampled_of_flat if is_flat else sampled_of_list,
        if_missing=_SAMPLE_LOGPROBS,
        if_partial=WHOLE_OUTPUT,
    )
    check_sum(logprobs, field_of(completion, "cumulative_logprob"), path=path)
    routes = [
        ("prompt_routed_experts", field_of(output, "prompt_routed_experts")),
        (f"{path}routed_experts", field_of(completion, "routed_experts")),
    ]
    spans = first_column((path, completion, "weight_versions"))
    num_tokens = len(response[1])
    return turn_arguments(
        prompt,
        response[1],
        logprobs,
        reason=field_of(completion, "finish_reason"),
        version_runs=runs_of(spans, (), given=policy_version, num_tokens=num_tokens),
        extras=routes_of(routed_experts, routes, num_tokens=len(prompt) + num_tokens),
    )


def from_sglang(
    response: Any,
    *,
    prompt_ids: Iterable[int],
    index: int | None = None,
    policy_version: int | None = None,
    routed_experts: str | None = None,
) -> TurnArguments:
    """Return the arguments of `append` for a response of SGLang's `/generate`, or of its engine.

    `writer.append(**turnstream.from_sglang(response, prompt_ids=input_ids))`

    Args:
        response: the JSON of one response, or a list of several. The last response of a stream has
            all tokens, unless the server runs with --incremental-streaming-output.
        prompt_ids: the `input_ids` of the request. The response does not have them.
        index: position in the list, where the request sampled several (n > 1).
        policy_version: version of the weights, for a response whose `weight_version` is no number.
        routed_experts: name of the extra column for the router choices; None leaves them out.

    Raises:
        InvalidTurnError: names the field that is missing or does not fit, and the option to set.
    """
    among = {"responses": response} if isinstance(response, list | tuple) else response
    output, path, _ = chosen(among, among="responses", index=index)
    meta, field = field_of(output, "meta_info"), f"{path}meta_info"
    ids = first_column((path, output, "output_ids"))
    if meta is None or ids is None:
        missing = f"{path}output_ids" if meta is not None else field
        raise InvalidTurnError(missing, "is missing: give the JSON of a response of /generate")
    if (reason := field_of(meta, "finish_reason")) is None:
        message = "is None: the request is still running; give the last response of a stream"
        raise InvalidTurnError(f"{field}.finish_reason", message)
    prompt = list_of(prompt_ids, field="prompt_ids")
    _check_counts(meta, field, num_prompt=len(prompt), num_response=len(ids[1]))
    pairs = first_column((f"{field}.", meta, "output_token_logprobs"))
    values = None if pairs is None else (pairs[0], [_first_of(pair) for pair in pairs[1]])
    logprobs = checked_logprobs(
        values or (f"{field}.output_token_logprobs", None),
        ids,
        if_missing=_RETURN_LOGPROB,
        if_partial="give the whole response",
    )
    routes = [(f"{field}.routed_experts", field_of(meta, "routed_experts"))]
    spans = first_column((f"{field}.", meta, "weight_versions"))
    labels, num_tokens = [field_of(meta, "weight_version")], len(ids[1])
    return turn_arguments(
        prompt,
        ids[1],
        logprobs,
        reason=reason,
        version_runs=runs_of(spans, labels, given=policy_version, num_tokens=num_tokens),
        extras=routes_of(routed_experts, routes, num_tokens=len(prompt) + num_tokens),
    )


def _check_counts(meta: Any, field: str, *, num_prompt: int, num_response: int) -> None:
    for name, number, what in (
        ("prompt_tokens", num_prompt, "prompt_ids has"),
        ("completion_tokens", num_response, "output_ids has"),
    ):
        expected = field_of(meta, name)
        if isinstance(expected, int) and expected != number:
            raise InvalidTurnError(f"{field}.{name}", f"is {expected}, {what} {number} tokens")


def _first_of(pair: Any) -> Any:
    return pair[0] if isinstance(pair, list | tuple) and pair else None


def from_tinker(
    response: Any, *, prompt: Any, index: int | None = None, policy_version: int | None = None
) -> TurnArguments:
    """Return the arguments of `append` for one sequence of a sampling client of the tinker SDK.

    `writer.append(**turnstream.from_tinker(response, prompt=prompt, policy_version=7))`

    Sample with temperature 1: the log-probabilities are those of the distribution after the
    temperature.

    Args:
        response: a SampleResponse, or one of its sequences.
        prompt: the ModelInput that was sampled from, or its token ids. The response has none.
        index: number of the sequence to take, where the request sampled several.
        policy_version: version of the weights. The response has none.

    Raises:
        InvalidTurnError: names the field that is missing or does not fit.
    """
    sequence, path, _ = chosen(response, among="sequences", index=index)
    to_ints = getattr(prompt, "to_ints", None)
    prompt_ids = list_of(to_ints() if callable(to_ints) else prompt, field="prompt")
    ids = first_column((path, sequence, "tokens"))
    if ids is None:
        raise InvalidTurnError(f"{path}tokens", "is missing")
    values = first_column((path, sequence, "logprobs")) or (f"{path}logprobs", None)
    remedy = "take the SampleResponse of a sampling client"
    logprobs = checked_logprobs(values, ids, if_missing=remedy, if_partial=remedy)
    return turn_arguments(
        prompt_ids,
        ids[1],
        logprobs,
        reason=field_of(sequence, "stop_reason"),
        version_runs=runs_of(None, (), given=policy_version, num_tokens=len(ids[1])),
    )
