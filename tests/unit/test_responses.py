"""Responses of engines become turns; the shapes are those of the versions in the file names."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from turnstream.errors import InvalidTurnError
from turnstream.generator.encode.checks import checked_turn
from turnstream.responses import from_openai, from_tinker, from_vllm

SHAPES = Path(__file__).parents[1] / "shapes"
PROMPT = [151644, 872, 30, 151645]
RESPONSE = [19, 17, 151645]
LOGPROBS = [-0.25, -0.5, -0.125]
TURN = {"prompt_ids": PROMPT, "response_ids": RESPONSE, "logprobs": LOGPROBS}

CHAT = "vllm-0.33.0-chat"
AS_TOKEN_IDS = "vllm-0.33.0-chat-as-token-ids"
COMPLETION = "vllm-0.33.0-completion"
SGLEXT = "sglang-0.5.23-chat-sglext"
WITH_IDS = [CHAT, COMPLETION, "sglang-0.5.23-chat", "sglang-0.5.23-completion"]


def shape(name: str) -> dict[str, Any]:
    """The JSON of one response."""
    return json.loads((SHAPES / f"{name}.json").read_text())


def as_object(response: dict[str, Any]) -> Any:
    """The same as attributes; the openai package leaves fields that it does not have as JSON."""
    made = json.loads(json.dumps(response), object_hook=lambda fields: SimpleNamespace(**fields))
    if "sglext" in response:
        made.sglext = response["sglext"]
    return made


@dataclass
class Logprob:
    """vLLM 0.33.0: `vllm.logprobs.Logprob`."""

    logprob: float
    rank: int | None = 1
    decoded_token: str | None = None


@dataclass
class FlatLogprobs:
    """vLLM 0.33.0: `vllm.logprobs.FlatLogprobs`, of `SamplingParams(flat_logprobs=True)`."""

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]

    def __len__(self) -> int:
        return len(self.start_indices)


@dataclass
class CompletionOutput:
    """vLLM 0.33.0: `vllm.outputs.CompletionOutput`, its fields that matter here."""

    index: int = 0
    token_ids: Any = field(default_factory=lambda: list(RESPONSE))
    logprobs: Any = field(default_factory=lambda: candidates(RESPONSE, LOGPROBS))
    cumulative_logprob: float | None = sum(LOGPROBS)
    finish_reason: str | None = "stop"

    def finished(self) -> bool:
        """Whether it is; a method here, an attribute of RequestOutput."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """vLLM 0.33.0: `vllm.outputs.RequestOutput`, its fields that matter here."""

    outputs: list[CompletionOutput]
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(PROMPT))
    finished: bool = True


def candidates(token_ids: list[int], logprobs: list[float]) -> list[dict[int, Logprob]]:
    """For each position the sampled token and a likelier one."""
    pairs = zip(token_ids, logprobs, strict=True)
    return [{token: Logprob(value, 2), 7: Logprob(-0.01)} for token, value in pairs]


def output(*completions: CompletionOutput) -> RequestOutput:
    return RequestOutput(list(completions or [CompletionOutput()]))


def test_a_request_output_becomes_a_turn_that_append_accepts() -> None:
    arguments = from_vllm(output())

    assert arguments == TURN
    turn = checked_turn(**arguments, policy_version=7)
    assert turn.prompt_ids.tolist() == PROMPT
    assert turn.logprobs is not None
    assert turn.logprobs.tolist() == LOGPROBS


def test_flat_logprobs_give_those_of_the_sampled_tokens() -> None:
    # Position 1 lists a likelier candidate first, position 2 the sampled token twice.
    flat = FlatLogprobs(
        [0, 1, 3], [1, 3, 5], [19, 7, 17, 151645, 151645], [-0.25, -0.01, -0.5, -0.125, -0.125]
    )

    assert from_vllm(output(CompletionOutput(logprobs=flat))) == TURN


def test_arrays_and_tuples_of_token_ids_are_taken() -> None:
    completion = CompletionOutput(token_ids=tuple(RESPONSE))
    prompt = np.array(PROMPT, np.int64)

    arguments = from_vllm(completion, prompt_ids=prompt)

    assert arguments == TURN
    assert {type(token) for token in arguments["prompt_ids"]} == {int}


def test_later_changes_of_an_output_leave_the_turn_alone() -> None:
    # vLLM extends the same lists while a request runs.
    given = output()
    arguments = from_vllm(given)

    given.outputs[0].token_ids.append(1)

    assert arguments == TURN


def test_several_outputs_need_an_index() -> None:
    other = CompletionOutput(
        index=1, token_ids=[5], logprobs=candidates([5], [-1.5]), cumulative_logprob=-1.5
    )
    given = output(other, CompletionOutput())  # not in the order of their indices

    with pytest.raises(InvalidTurnError, match=r"^index: is None, but outputs has 2: name one of"):
        from_vllm(given)
    with pytest.raises(InvalidTurnError, match=r"^index: 2 is not in outputs, which has \[1, 0\]"):
        from_vllm(given, index=2)
    assert from_vllm(given, index=0) == TURN
    assert from_vllm(given, index=1)["response_ids"] == [5]


@pytest.mark.parametrize("index", [0, None], ids=["equal", "none"])
def test_outputs_without_own_indices_are_named_by_position(index: Any) -> None:
    first = replace(CompletionOutput(), index=index, finish_reason=None)
    second = replace(CompletionOutput(), index=index)

    assert from_vllm(output(first, second), index=1) == TURN
    assert from_vllm(output(second), index=0) == TURN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, r"^outputs\[0\]\.token_ids: is missing"),
        (
            {"logprobs": None},
            r"^outputs\[0\]\.logprobs: is missing: .*SamplingParams\(logprobs=0\)",
        ),
        (
            {"logprobs": candidates(RESPONSE[1:], LOGPROBS[1:])},
            r"^outputs\[0\]\.logprobs: has 2 values, .*token_ids has 3; .*or FINAL_ONLY",
        ),
        (
            {"logprobs": [*candidates(RESPONSE[:2], LOGPROBS[:2]), {7: Logprob(-1.0)}]},
            r"^outputs\[0\]\.logprobs\[2\]: is missing: token 151645 has none",
        ),
        ({"logprobs": [None] * 3}, r"^outputs\[0\]\.logprobs\[0\]: is missing: token 19 has none"),
        (
            {"logprobs": candidates(RESPONSE, [-0.25, float("nan"), -0.125])},
            r"^outputs\[0\]\.logprobs\[1\]: nan is not finite",
        ),
        ({"finish_reason": None}, r"^outputs\[0\]\.finish_reason: is None: .* still running"),
    ],
)
def test_a_wrong_output_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTurnError, match=message):
        from_vllm(output(replace(CompletionOutput(), **changes)))


def test_the_last_output_of_a_delta_stream_is_refused() -> None:
    # It has the prompt and a finish_reason, but only the newest tokens: a turn would lack the rest.
    last = CompletionOutput(token_ids=RESPONSE[2:], logprobs=candidates(RESPONSE, LOGPROBS)[2:])

    with pytest.raises(InvalidTurnError, match=r"cumulative_logprob: -0\.875 is not the sum"):
        from_vllm(output(last))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([output()], r"^outputs: cannot be read from \[RequestOutput.* give one response"),
        (None, r"^outputs: cannot be read from None"),
        (RequestOutput([]), r"^outputs: is empty"),
        (SimpleNamespace(outputs=SimpleNamespace(data=1)), r"^outputs: namespace.* is not a list"),
        (
            CompletionOutput(),
            r"^prompt_token_ids: is missing: give the RequestOutput, or prompt_id",
        ),
    ],
)
def test_values_that_are_no_request_output_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidTurnError, match=message):
        from_vllm(given)


@pytest.mark.parametrize("convert", [dict, as_object], ids=["json", "object"])
@pytest.mark.parametrize("name", WITH_IDS)
def test_responses_with_token_ids_become_turns(name: str, convert: Any) -> None:
    assert from_openai(convert(shape(name))) == TURN


@pytest.mark.parametrize("name", ["vllm-0.33.0-completion", "sglang-0.5.23-chat"])
def test_a_choice_that_has_its_prompt_needs_no_response(name: str) -> None:
    assert from_openai(shape(name)["choices"][0]) == TURN


def test_a_chat_choice_of_vllm_needs_its_prompt() -> None:
    choice = shape(CHAT)["choices"][0]

    with pytest.raises(
        InvalidTurnError, match=r"^prompt_token_ids: .* give the whole response, or"
    ):
        from_openai(choice)
    assert from_openai(choice, prompt_ids=PROMPT) == TURN


def test_a_prompt_that_differs_from_the_response_is_refused() -> None:
    assert from_openai(shape(CHAT), prompt_ids=PROMPT) == TURN
    with pytest.raises(
        InvalidTurnError, match=r"^prompt_ids: differs from prompt_token_ids, the 4 tokens"
    ):
        from_openai(shape(CHAT), prompt_ids=PROMPT[1:])


def test_tokens_of_the_form_token_id_are_read() -> None:
    assert from_openai(shape(AS_TOKEN_IDS), prompt_ids=PROMPT) == TURN

    completion = shape(COMPLETION)
    completion["choices"][0]["token_ids"] = None
    completion["choices"][0]["logprobs"]["tokens"] = [f"token_id:{token}" for token in RESPONSE]
    assert from_openai(completion) == TURN


@pytest.mark.parametrize("convert", [dict, as_object], ids=["json", "object"])
def test_the_extension_of_sglang_is_read_by_choice(convert: Any) -> None:
    response = convert(shape(SGLEXT))

    assert from_openai(response, index=1) == TURN
    assert from_openai(response, index=0)["response_ids"] == [19, 16]
    with pytest.raises(InvalidTurnError, match=r"^index: is None, but choices has 2: name one of"):
        from_openai(response)


def test_an_empty_response_needs_no_logprobs() -> None:
    response = shape(CHAT)
    response["choices"][0] |= {"token_ids": [], "logprobs": None, "finish_reason": "abort"}

    assert from_openai(response) == {"prompt_ids": PROMPT, "response_ids": [], "logprobs": []}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (CHAT, {"token_ids": None}, r"^choices\[0\]\.token_ids: is missing: .*return_token_ids=tr"),
        (CHAT, {"token_ids": "4"}, r"^choices\[0\]\.token_ids: '4' is not a list"),
        (
            CHAT,
            {"token_ids": [19]},
            r"logprobs\.content: has 3 values, choices\[0\]\.token_ids has 1",
        ),
        (CHAT, {"logprobs": None}, r"^choices\[0\]\.logprobs: is missing: send logprobs=true"),
        (CHAT, {"logprobs": {"content": None}}, r"^choices\[0\]\.logprobs: is missing"),
        (
            COMPLETION,
            {"logprobs": {"tokens": ["a"] * 7, "token_logprobs": [None, *[-1.0] * 6]}},
            r"token_logprobs: has 7 values, choices\[0\]\.token_ids has 3; .*without echo=true",
        ),
        (
            COMPLETION,
            {"logprobs": {"tokens": ["a"] * 3, "token_logprobs": [None, -1.0, -1.0]}},
            r"^choices\[0\]\.logprobs\.token_logprobs\[0\]: is missing: .*without echo=true",
        ),
        (CHAT, {"finish_reason": None}, r"^choices\[0\]\.finish_reason: None .*send stream=false"),
        (CHAT, {"delta": {"content": "4"}}, r"^choices\[0\]\.delta: .*send stream=false"),
    ],
)
def test_a_wrong_choice_is_refused_by_field(
    name: str, changes: dict[str, Any], message: str
) -> None:
    response = shape(name)
    response["choices"][0] |= changes

    with pytest.raises(InvalidTurnError, match=message):
        from_openai(response)


def test_a_missing_prompt_names_the_server_option() -> None:
    response = shape(CHAT) | {"prompt_token_ids": None}

    with pytest.raises(InvalidTurnError, match=r"^prompt_token_ids: .*return_token_ids=true"):
        from_openai(response)


@pytest.mark.parametrize("value", [-9999.0, -3.4028234663852886e38])
def test_placeholders_of_missing_logprobs_are_refused(value: float) -> None:
    # vLLM's chat answers -9999.0 where it has none, SGLang the least float32 in place of -inf.
    response = shape(CHAT)
    response["choices"][0]["logprobs"]["content"][1]["logprob"] = value

    with pytest.raises(InvalidTurnError, match=r"logprobs\.content\[1\]: -.*without a log-prob"):
        from_openai(response)


def test_texts_of_which_some_are_token_ids_are_refused() -> None:
    response = shape(AS_TOKEN_IDS)
    response["choices"][0]["logprobs"]["content"][1]["token"] = "2"

    with pytest.raises(InvalidTurnError, match=r"logprobs\.content: '2' at position 1 has not"):
        from_openai(response, prompt_ids=PROMPT)


def test_an_extension_without_the_choice_is_refused() -> None:
    response = copy.deepcopy(shape(SGLEXT))
    response["sglext"]["output_ids"].pop()

    with pytest.raises(InvalidTurnError, match=r"^sglext\.output_ids: has 1 responses, and none"):
        from_openai(response, index=1)


@pytest.mark.parametrize("given", ["{}", None, 3, [], [{"index": 0}]])
def test_values_that_are_no_response_are_refused(given: Any) -> None:
    with pytest.raises(InvalidTurnError, match=r"^choices: cannot be read from "):
        from_openai(given)


def test_sample_of_the_tinker_sdk_becomes_a_turn() -> None:
    tinker = pytest.importorskip("tinker")
    sequences = [
        tinker.SampledSequence(
            stop_reason="stop",
            sequence_id="s",
            tokens_np=np.array(ids, np.int32),
            logprobs_np=np.array(logprobs, np.float32),
        )
        for ids, logprobs in (([5], [-1.0]), (RESPONSE, LOGPROBS))
    ]
    response = tinker.SampleResponse(sequences=sequences)

    turn = from_tinker(response, prompt=tinker.ModelInput.from_ints(PROMPT), index=1)

    assert turn == TURN
    assert from_tinker(sequences[1], prompt=PROMPT) == TURN


def test_sample_without_logprobs_is_refused() -> None:
    with pytest.raises(InvalidTurnError, match=r"sequences\[0\].logprobs: is missing"):
        from_tinker({"sequences": [{"tokens": [5]}]}, prompt=PROMPT)
