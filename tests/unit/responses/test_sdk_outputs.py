"""Outputs of the classes of vLLM and of the tinker SDK become turns."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from testkit.requests.engine_responses import (
    LOGPROBS,
    PLAIN,
    PROMPT,
    RESPONSE,
    TURN,
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    RequestOutput,
    candidates,
    output,
)
from turnstream.errors import InvalidTurnError
from turnstream.generator.encode.checks import checked_turn
from turnstream.responses import from_tinker, from_vllm


def test_output_of_vllm_becomes_a_turn_of_its_own_that_append_accepts() -> None:
    given = output()
    arguments = from_vllm(given)
    given.outputs[0].token_ids.append(1)  # as vLLM does while a request runs
    arrays = from_vllm(
        CompletionOutput(token_ids=tuple(RESPONSE)), prompt_ids=np.array(PROMPT, np.int64)
    )

    assert arguments == arrays == TURN
    assert {type(token) for token in arrays["prompt_ids"]} == {int}
    turn = checked_turn(**PLAIN, policy_version=7)
    assert turn.prompt_ids.tolist() == PROMPT
    assert turn.logprobs is not None
    assert turn.logprobs.tolist() == LOGPROBS


def test_flat_logprobs_give_those_of_the_sampled_tokens() -> None:
    # Position 1 lists a likelier candidate first, position 2 the sampled token twice.
    flat = FlatLogprobs(
        [0, 1, 3], [1, 3, 5], [19, 7, 17, 151645, 151645], [-0.25, -0.01, -0.5, -0.125, -0.125]
    )

    assert from_vllm(output(CompletionOutput(logprobs=flat))) == TURN


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
        ({"logprobs": None}, r"^outputs\[0\]\.logprobs: is missing: .*SamplingParams\(logprobs=0"),
        ({"logprobs": candidates(RESPONSE[1:], LOGPROBS[1:])}, r"logprobs: has 2 values, .*has 3"),
        (
            {"logprobs": [*candidates(RESPONSE[:2], LOGPROBS[:2]), {7: Logprob(-1.0)}]},
            r"^outputs\[0\]\.logprobs\[2\]: is missing: token 151645 has none",
        ),
        ({"logprobs": [None] * 3}, r"^outputs\[0\]\.logprobs\[0\]: is missing: token 19 has none"),
        (
            {"logprobs": candidates(RESPONSE, [-0.25, float("nan"), -0.125])},
            r"\[1\]: nan is not finite",
        ),
        ({"finish_reason": None}, r"^outputs\[0\]\.finish_reason: is None: .* still running"),
        (  # the last output of a delta stream has only the newest tokens
            {"token_ids": RESPONSE[2:], "logprobs": candidates(RESPONSE, LOGPROBS)[2:]},
            r"cumulative_logprob: -0\.875 is not the sum",
        ),
    ],
)
def test_a_wrong_output_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTurnError, match=message):
        from_vllm(output(replace(CompletionOutput(), **changes)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([output()], r"^outputs: cannot be read from \[RequestOutput.* give one response"),
        (None, r"^outputs: cannot be read from None"),
        (RequestOutput([]), r"^outputs: is empty"),
        (SimpleNamespace(outputs=SimpleNamespace(data=1)), r"^outputs: namespace.* is not a list"),
        (CompletionOutput(), r"^prompt_token_ids: is missing: give the RequestOutput, or prompt_i"),
    ],
)
def test_values_that_are_no_request_output_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidTurnError, match=message):
        from_vllm(given)


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

    turn = from_tinker(
        response, prompt=tinker.ModelInput.from_ints(PROMPT), index=1, policy_version=7
    )

    assert turn == TURN | {"version_runs": [(7, 3)]}
    assert from_tinker(sequences[1], prompt=PROMPT) == TURN


def test_sample_without_logprobs_is_refused() -> None:
    with pytest.raises(InvalidTurnError, match=r"sequences\[0\].logprobs: is missing"):
        from_tinker({"sequences": [{"tokens": [5]}]}, prompt=PROMPT)
