"""Bodies for engines and answers for agents: fields added for a turn are removed again."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from turnstream.errors import InvalidConfigError
from turnstream.responses import from_openai
from turnstream_server.gateway.proxy.requests import (
    Route,
    Wanted,
    answered,
    chunks_of,
    engine_body,
    wanted_of,
)

_SHAPES = Path(__file__).parents[3] / "shapes"
_CHAT = {"model": "policy", "messages": [{"role": "user", "content": "6 * 7?"}]}
_TEXT = {"model": "policy", "prompt": "6 * 7?"}

NOTHING = wanted_of({"stream": True})
EVERYTHING = Wanted(True, True, True, frozenset({"input_ids", "output_ids"}), True)


def shapes() -> list[Any]:
    """Return the recorded responses that have token ids, each with its name."""
    named = {path.stem: json.loads(path.read_text()) for path in sorted(_SHAPES.glob("*.json"))}
    return [pytest.param(shape, id=name) for name, shape in named.items() if "-as-" not in name]


def test_bodies_ask_for_everything_that_a_turn_has() -> None:
    added = {"return_token_ids": True, "return_weight_versions": True}
    assert engine_body(_CHAT, route="chat/completions", kind="vllm") == {
        **_CHAT, **added, "logprobs": True,
    }  # fmt: skip
    streamed = {**_TEXT, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert engine_body(streamed, route="completions", kind="vllm") == {
        **streamed, **added, "logprobs": 1,
        "stream_options": {"continuous_usage_stats": True, "include_usage": True},
    }  # fmt: skip
    for kind in ("sglang", "hosted"):
        assert engine_body(streamed, route="completions", kind=kind) == {
            **_TEXT, "return_token_ids": True, "logprobs": 1, "stream": False,
        }  # fmt: skip


def test_options_of_the_agent_stay_in_the_body() -> None:
    own = {
        "logprobs": True,
        "top_logprobs": 3,
        "n": 64,
        "stop": ["\n"],
        "best_of": 1,
        "echo": False,
    }
    assert own.items() <= engine_body(_CHAT | own, route="chat/completions", kind="vllm").items()
    for number in (0, 5):
        body = engine_body(_TEXT | {"logprobs": number}, route="completions", kind="vllm")
        assert body["logprobs"] == number


_WRONG: list[tuple[Route, dict[str, Any], str]] = [
    ("completions", {"echo": True}, "echo"),
    ("completions", {"best_of": 2}, "best_of"),
    ("completions", {"logprobs": False}, "logprobs"),
    ("completions", {"logprobs": "1"}, "logprobs"),
    ("completions", {"prompt": ["a", "b"]}, "prompt"),
    ("completions", {"prompt": [[1], [2]]}, "prompt"),
    ("completions", {"prompt_embeds": "AA=="}, "prompt_embeds"),
    ("chat/completions", {"n": 65}, "n"),
    ("chat/completions", {"n": 0}, "n"),
    ("chat/completions", {"n": 1.0}, "n"),
    ("chat/completions", {"n": True}, "n"),
    ("chat/completions", {"logprobs": 1}, "logprobs"),
    ("chat/completions", {"top_logprobs": 3}, "top_logprobs"),
    ("chat/completions", {"stream": 1}, "stream"),
    ("chat/completions", {"stream_options": True}, "stream_options"),
    ("chat/completions", {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ("chat/completions", {"use_beam_search": True}, "use_beam_search"),
    ("chat/completions", {"include_reasoning": False}, "include_reasoning"),
]


@pytest.mark.parametrize(("route", "options", "field"), _WRONG, ids=str)
def test_options_that_cannot_be_stored_are_refused(
    route: Route, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        engine_body({**_TEXT, **options}, route=route, kind="vllm")
    assert caught.value.field == field


def test_one_prompt_of_each_form_is_accepted() -> None:
    for prompt in ("a", ["a"], [1, 2], [[1, 2]], []):
        assert (
            engine_body({"prompt": prompt}, route="completions", kind="sglang")["prompt"] == prompt
        )


def test_wanted_fields_are_those_the_agent_named() -> None:
    assert wanted_of(_CHAT) == Wanted(False, True, False, frozenset(), False)
    own = {
        "logprobs": 0, "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True, "return_weight_versions": True,
        "return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True,
    }  # fmt: skip
    assert wanted_of(own) == EVERYTHING
    assert not wanted_of({"logprobs": False, "stream": True, "stream_options": None}).usage


@pytest.mark.parametrize("shape", shapes())
def test_answers_have_only_the_wanted_fields(shape: dict[str, Any]) -> None:
    before = copy.deepcopy(shape)
    assert answered(shape, EVERYTHING) == before
    shape["choices"][0]["weight_versions"] = [{"version": "7", "start": 0, "end": 3}]
    plain = answered(shape, wanted_of({}))
    assert plain is not None
    assert plain["usage"] == before["usage"]
    text = json.dumps(plain)
    assert not [name for name in ("token_ids", "weight_versions", "_ids", "sglext") if name in text]
    for choice, own in zip(plain["choices"], before["choices"], strict=True):
        assert choice["logprobs"] is None
        assert choice["finish_reason"] == own["finish_reason"]
        for name in {"message", "text"} & own.keys():
            assert choice[name] == own[name]
    assert shape["choices"][0].pop("weight_versions")
    assert shape | {"choices": before["choices"]} == before  # the original is unchanged


@pytest.mark.parametrize("shape", shapes())
def test_chunks_of_a_response_are_the_same_turn(shape: dict[str, Any]) -> None:
    chunks = list(chunks_of(shape))
    for index in range(len(shape["choices"])):
        assert from_openai(chunks, index=index) == from_openai(shape, index=index)
    shown = [each for chunk in chunks if (each := answered(chunk, NOTHING)) is not None]
    assert all(each["choices"] for each in shown)
    assert [each["finish_reason"] for each in shape["choices"]] == [
        reason for each in shown if (reason := each["choices"][0]["finish_reason"])
    ]
    assert answered(chunks[-1], EVERYTHING) == chunks[-1]


def test_tool_calls_have_an_index_in_chunks() -> None:
    calls = [{"id": "c0", "type": "function", "function": {"name": "add", "arguments": "{}"}}] * 2
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    first, end, _ = chunks_of({"object": "chat.completion", "choices": [choice]})
    delta = first["choices"][0]["delta"]
    assert "content" not in delta
    assert [each["index"] for each in delta["tool_calls"]] == [0, 1]
    assert end["choices"][0]["finish_reason"] == "tool_calls"


def test_chunks_that_only_we_asked_for_are_dropped() -> None:
    empty = {"index": 0, "delta": {}, "logprobs": {"content": []}, "token_ids": [7]}
    usage = {"choices": [], "usage": {"completion_tokens": 1}}
    ids = {"choices": [], "sglext": {"input_ids": [7], "output_ids": [[8]]}}
    for chunk in ({"choices": [empty | {"finish_reason": None}]}, usage, ids):
        assert answered(chunk, NOTHING) is None
        assert answered(chunk, EVERYTHING) == chunk
    end = answered({"choices": [empty | {"finish_reason": "stop"}]}, NOTHING)
    assert end == {
        "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    }
    heartbeat = {"choices": [], "id": "x"}
    assert answered(heartbeat, NOTHING) == heartbeat
    routed = {"choices": [], "sglext": {"routed_experts": "AA==", "input_ids": [7]}}
    assert answered(routed, NOTHING) == {"choices": [], "sglext": {"routed_experts": "AA=="}}
