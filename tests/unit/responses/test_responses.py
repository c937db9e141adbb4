"""Responses of engines become turns; the shapes are those of the versions in the file names."""

from __future__ import annotations

import base64
import io
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
    as_object,
    output,
    shape,
)
from turnstream.errors import InvalidTurnError
from turnstream.generator.encode.checks import checked_turn, with_checked_extras
from turnstream.responses import from_openai, from_sglang, from_vllm
from turnstream.types import DeclaredColumn, Turn

EMPTY = {"prompt_ids": PROMPT, "response_ids": [], "logprobs": [], "allow_empty": True}
ROUTES = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
CHAT = "vllm-0.33.0-chat"
AS_TOKEN_IDS = "vllm-0.33.0-chat-as-token-ids"
COMPLETION = "vllm-0.33.0-completion"
SGLEXT = "sglang-0.5.23-chat-sglext"
WITH_IDS = [CHAT, COMPLETION, "sglang-0.5.23-chat", "sglang-0.5.23-completion"]


@pytest.mark.parametrize("convert", [dict, as_object], ids=["json", "object"])
@pytest.mark.parametrize("name", WITH_IDS)
def test_responses_with_token_ids_become_turns(name: str, convert: Any) -> None:
    assert from_openai(convert(shape(name))) == TURN


def test_prompt_is_that_of_the_choice_the_response_or_the_caller() -> None:
    for name in ("vllm-0.33.0-completion", "sglang-0.5.23-chat"):
        assert from_openai(shape(name)["choices"][0]) == TURN
    choice = shape(CHAT)["choices"][0]  # a chat choice of vLLM has none

    with pytest.raises(
        InvalidTurnError, match=r"^prompt_token_ids: .* give the whole response, or"
    ):
        from_openai(choice)
    assert from_openai(choice, prompt_ids=PROMPT) == TURN
    assert from_openai(shape(CHAT), prompt_ids=PROMPT) == TURN
    with pytest.raises(
        InvalidTurnError, match=r"^prompt_ids: differs from prompt_token_ids, the 4 tokens"
    ):
        from_openai(shape(CHAT), prompt_ids=PROMPT[1:])


def test_tokens_of_the_form_token_id_are_read() -> None:
    response = shape(AS_TOKEN_IDS)
    assert from_openai(response, prompt_ids=PROMPT) == TURN
    response["choices"][0]["logprobs"]["content"][1]["token"] = "2"
    with pytest.raises(InvalidTurnError, match=r"logprobs\.content: '2' at position 1 has not"):
        from_openai(response, prompt_ids=PROMPT)

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
    extension: Any = response["sglext"] if convert is dict else response.sglext
    extension["output_ids"].pop()
    with pytest.raises(InvalidTurnError, match=r"^sglext\.output_ids: has 1 responses, and none"):
        from_openai(response, index=1)


@pytest.mark.parametrize(("reason", "status"), [("stop", "truncated"), ("abort", "aborted")])
def test_an_empty_response_is_a_turn_that_is_not_complete(reason: str, status: str) -> None:
    response = shape(CHAT)
    response["choices"][0] |= {"token_ids": [], "logprobs": None, "finish_reason": reason}

    assert from_openai(response, policy_version=7) == EMPTY | {"status": status}


def test_finish_reasons_become_statuses(caplog: pytest.LogCaptureFixture) -> None:
    for reason, status in {
        "stop": "completed",
        "tool_calls": "completed",
        "length": "truncated",
        "abort": "aborted",
        "error": "error",
        "content_filter": "error",
        "a reason of tomorrow": "error",
    }.items():
        response = shape(CHAT)
        response["choices"][0]["finish_reason"] = reason
        of_vllm = output(CompletionOutput(finish_reason=reason))
        of_sglang = generated(finish_reason={"type": reason})

        assert from_openai(response)["status"] == status, reason
        assert from_vllm(of_vllm)["status"] == status, reason
        assert from_sglang(of_sglang, prompt_ids=PROMPT)["status"] == status, reason
    assert caplog.text.count("'a reason of tomorrow' is unknown") == 1


def stored(turn: Any, **more: Any) -> Turn:
    """The turn of these arguments, as `append` checks it."""
    return checked_turn(**{name: turn[name] for name in turn if name != "status"}, **more)


@pytest.mark.parametrize(
    ("spans", "runs"),
    [
        ([("7", 0, 3)], [(7, 3)]),
        ([("v7", 0, 1), (8, 1, 3)], [(7, 1), (8, 2)]),
        ([("7", 1, 3)], [(None, 1), (7, 2)]),
        ([("unknown", 0, 3)], [(5, 3)]),
        ([], [(5, 3)]),
        (None, [(5, 3)]),
    ],
)
def test_versions_of_a_response_become_version_runs(spans: Any, runs: Any) -> None:
    names = ("version", "start", "end")
    listed = spans and [dict(zip(names, span, strict=True)) for span in spans]
    response = shape(CHAT)
    response["choices"][0]["weight_versions"] = listed
    completion = CompletionOutput(weight_versions=listed and [SimpleNamespace(**x) for x in listed])

    for turn in (
        from_openai(response, policy_version=5),
        from_vllm(output(completion), policy_version=5),
    ):
        assert turn.get("version_runs") == runs
        assert stored(turn).version_runs == tuple(runs)


@pytest.mark.parametrize("span", [(2, 1), (0, 4), (None, 3)])
def test_versions_of_other_tokens_are_refused(span: Any) -> None:
    response = shape(CHAT)
    wrong = {"version": "7", "start": span[0], "end": span[1]}
    response["choices"][0]["weight_versions"] = [wrong]

    with pytest.raises(InvalidTurnError, match=r"weight_versions\[0\]: .* is no part of 3 tokens"):
        from_openai(response)


def test_version_of_an_sglang_chat_completion_is_read() -> None:
    response = shape("sglang-0.5.23-chat")
    assert "version_runs" not in from_openai(response)

    response["metadata"]["weight_version"] = "7"
    turn = from_openai(response)
    assert turn.get("version_runs") == [(7, 3)]
    assert stored(turn, policy_version=7).version_runs == ((7, 3),)
    with pytest.raises(InvalidTurnError, match="policy_version: 6 and version_runs are both"):
        stored(turn, policy_version=6)


def numpy_file(array: Any) -> str:
    """VLLM 0.33.0: base64 of the file that numpy writes."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def flat(array: Any) -> str:
    """SGLang 0.5.23: base64 of int32 numbers."""
    return base64.b64encode(array.astype("<i4").tobytes()).decode()


def test_router_choices_become_an_extra_column() -> None:
    whole, split = shape(CHAT), shape(CHAT)
    whole["choices"][0]["routed_experts"] = numpy_file(ROUTES)
    split["prompt_routed_experts"] = ROUTES[:4].tolist()
    split["choices"][0]["routed_experts"] = ROUTES[4:].tolist()
    sglext = shape("sglang-0.5.23-chat") | {"sglext": {"routed_experts": flat(ROUTES)}}
    declared = (DeclaredColumn(name="routes", per="first_tokens", dtype="int16", shape=(2, 2)),)

    for turn in (
        from_openai(whole, routed_experts="routes"),
        from_openai(split, routed_experts="routes"),
        from_openai(sglext, routed_experts="routes"),
        from_vllm(output(CompletionOutput(routed_experts=ROUTES)), routed_experts="routes"),
        from_sglang(
            generated(routed_experts=flat(ROUTES)), prompt_ids=PROMPT, routed_experts="routes"
        ),
    ):
        checked = with_checked_extras(checked_turn(**PLAIN), turn.get("extras"), declared)
        assert checked.extras["routes"].tolist() == ROUTES.tolist()
    assert from_openai(whole) == TURN


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"^routed_experts: is missing: .*--enable-return-routed-experts"),
        (ROUTES[4:], r"routed_experts: has the choices of 2 tokens, not of all but the last of 7"),
        ("%", r"routed_experts: '%' has no router choices of 6 tokens"),
        (flat(ROUTES[:5]), r"routed_experts: '.* has no router choices of 6 tokens"),
    ],
)
def test_router_choices_of_other_tokens_are_refused(value: Any, message: str) -> None:
    response = shape(CHAT)
    response["choices"][0]["routed_experts"] = value

    with pytest.raises(InvalidTurnError, match=message):
        from_openai(response, routed_experts="routes")


def generated(**meta: Any) -> dict[str, Any]:
    """SGLang 0.5.23: the JSON of `/generate`."""
    pairs = [[value, token, None] for value, token in zip(LOGPROBS, RESPONSE, strict=True)]
    return {
        "text": "42",
        "output_ids": RESPONSE,
        "meta_info": {
            "id": "f6",
            "finish_reason": {"type": "stop", "matched": 151645},
            "prompt_tokens": 4,
            "weight_version": "default",
            "completion_tokens": 3,
            "output_token_logprobs": pairs,
        }
        | meta,
    }


def test_responses_of_generate_become_turns() -> None:
    assert from_sglang(generated(), prompt_ids=PROMPT) == TURN
    several = [generated(finish_reason={"type": "length"}), generated(weight_version="7")]
    assert from_sglang(several, prompt_ids=PROMPT, index=0) == TURN | {"status": "truncated"}
    second = from_sglang(several, prompt_ids=PROMPT, index=1)
    assert second == TURN | {"version_runs": [(7, 3)]}


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (generated(finish_reason=None), r"^meta_info\.finish_reason: is None: .*still running"),
        (generated(prompt_tokens=5), r"^meta_info\.prompt_tokens: is 5, prompt_ids has 4"),
        (generated(completion_tokens=9), r"^meta_info\.completion_tokens: is 9, output_ids has 3"),
        (generated(output_token_logprobs=None), r"output_token_logprobs: is missing: .*return_log"),
        ([generated(), generated()], r"^index: is None, but responses has 2"),
        ({"text": "42"}, r"^meta_info: is missing: give the JSON of a response of /generate"),
        ({"meta_info": {}}, r"^output_ids: is missing: give the JSON of a response of /generate"),
    ],
)
def test_a_wrong_response_of_generate_is_refused_by_field(response: Any, message: str) -> None:
    with pytest.raises(InvalidTurnError, match=message):
        from_sglang(response, prompt_ids=PROMPT)


def chunks_of(name: str) -> list[dict[str, Any]]:
    """The stream of a response, a token in each chunk, as vLLM 0.33.0 sends it."""
    response = shape(name)
    choice = response["choices"][0]
    chat = "message" in choice
    empty = {"delta": {}} if chat else {"text": ""}
    parts: list[dict[str, Any]] = [{"index": 0, "finish_reason": None, "token_ids": None, **empty}]
    for at in range(3):
        fields = choice["logprobs"]
        logprobs = {field: fields[field][at : at + 1] for field in fields}
        ids = {"token_ids": choice["token_ids"][at : at + 1], "logprobs": logprobs}
        parts.append(parts[0] | ids)
    parts[0]["prompt_token_ids"] = choice.get("prompt_token_ids")
    parts[-1] |= {
        "finish_reason": "length",
        "weight_versions": [{"version": "7", "start": 0, "end": 3}],
    }
    chunks = [{"id": response["id"], "choices": [part]} for part in parts]
    chunks[0]["prompt_token_ids"] = response.get("prompt_token_ids")
    return [*chunks, {"id": response["id"], "choices": [], "usage": {"completion_tokens": 3}}]


@pytest.mark.parametrize("convert", [list, iter, lambda chunks: [*map(as_object, chunks)]])
@pytest.mark.parametrize("name", [CHAT, COMPLETION])
def test_chunks_of_a_stream_become_one_turn(name: str, convert: Any) -> None:
    turn = from_openai(convert(chunks_of(name)))

    assert turn == PLAIN | {"status": "truncated", "version_runs": [(7, 3)]}


def test_a_stream_that_is_not_whole_is_refused() -> None:
    chunks = chunks_of(CHAT)
    other = chunks_of(COMPLETION)

    for given, message in (
        (chunks[:3], r"^choices\[0\]\.finish_reason: is in none of the 3 chunks"),
        (chunks[:2] + chunks[3:], r"^usage\.completion_tokens: is 3, the chunks have 2"),
        (chunks[1:], r"^prompt_token_ids: is missing"),
        (chunks + other, r"^id: .* are several responses"),
        ([shape(CHAT)], r"^choices: cannot be read from "),
        (chunks[1], r"^choices\[0\]\.delta: .*give a list of all chunks"),
    ):
        with pytest.raises(InvalidTurnError, match=message):
            from_openai(given)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (CHAT, {"token_ids": None}, r"^choices\[0\]\.token_ids: is missing: .*return_token_ids=tr"),
        (CHAT, {"token_ids": "4"}, r"^choices\[0\]\.token_ids: '4' is not a list"),
        (CHAT, {"token_ids": [19]}, r"content: has 3 values, choices\[0\]\.token_ids has 1"),
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


RESPONSES_API = r"of the Responses API, .*chat\.completions\.create"
SERVER_ERROR = r"^error: the server .* an error: .*no such model"
ERROR = {"message": "no such model", "code": 404}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            (each, r"^choices: cannot be read from ")
            for each in ("{}", None, 3, [], [{"index": 0}])
        ),
        ({"object": "response", "output": []}, RESPONSES_API),
        (SimpleNamespace(object="response", output=[]), RESPONSES_API),
        ([{"type": "response.created"}, {"type": "response.completed"}], RESPONSES_API),
        ({"error": ERROR}, SERVER_ERROR),
        ({"object": "error"} | ERROR, SERVER_ERROR),
        ([{"choices": [{"index": 0, "delta": {}}]}, {"error": ERROR}], SERVER_ERROR),
        (shape(CHAT) | {"prompt_token_ids": None}, r"^prompt_token_ids: .*return_token_ids=true"),
    ],
)
def test_values_that_are_no_response_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidTurnError, match=message):
        from_openai(given)


@pytest.mark.parametrize("value", [-9999.0, -3.4028234663852886e38])
def test_placeholders_of_missing_logprobs_are_refused(value: float) -> None:
    # vLLM's chat answers -9999.0 where it has none, SGLang the least float32 in place of -inf.
    response = shape(CHAT)
    response["choices"][0]["logprobs"]["content"][1]["logprob"] = value

    with pytest.raises(InvalidTurnError, match=r"logprobs\.content\[1\]: -.*without a log-prob"):
        from_openai(response)
