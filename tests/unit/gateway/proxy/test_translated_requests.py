"""Requests of other APIs become chat completions; a field without a translation is refused."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from turnstream.errors import InvalidConfigError
from turnstream_server.gateway.proxy.anthropic_api import chat_of_message, listed_models
from turnstream_server.gateway.proxy.responses_api import chat_of_response

_SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": _SCHEMA},
}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
_HI = {"role": "user", "content": "hi"}
_ANSWER = {
    "role": "assistant",
    "content": "so",
    "reasoning": "hm",
    "reasoning_content": "hm",
    "tool_calls": [_CALL],
}
_CHAT = {
    "model": "policy",
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "max_tokens": 9,
    "tools": [_TOOL],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "see"}, _IMAGE]},
        _ANSWER,
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "user", "content": "and?"},
    ],
}


def with_schema(name: str) -> dict[str, Any]:
    schema = {"name": name, "schema": _SCHEMA}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def test_message_request_is_a_chat_completion():
    text = {"type": "text", "text": "see", "cache_control": {"type": "ephemeral"}}
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    body = {
        "model": "policy",
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "max_tokens": 9,
        "stop_sequences": ["END"],
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA, "type": "custom"}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "output_config": {
            "effort": "low",
            "format": {"type": "json_schema", "schema": _SCHEMA},
        },
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "service_tier": None,
        "messages": [
            {"role": "user", "content": [text, {"type": "image", "source": source}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "s"},
                    {"type": "text", "text": "o"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": "é"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "4"}],
                    },
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
    }

    assert chat_of_message(body) == {**_CHAT, "stop": ["END"], **with_schema("output")}


def test_response_request_is_a_chat_completion():
    parts = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
    ]
    output = {"type": "output_text", "text": "so", "annotations": []}
    body = {
        "model": "policy",
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "max_output_tokens": 9,
        "instructions": "be brief",
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": _SCHEMA}],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
        "include": ["reasoning.encrypted_content"],
        "store": True,
        "truncation": "disabled",
        "background": False,
        "stream_options": {"include_obfuscation": False},
        "input": [
            {"role": "user", "content": parts},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"type": "message", "id": "msg_1", "role": "assistant", "content": [output]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": "é"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "4"},
            {"type": "message", "role": "user", "content": "and?"},
        ],
    }

    assert chat_of_response(body) == _CHAT | with_schema("n")


def test_items_of_an_answer_are_one_message_until_the_next_answer():
    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": "é"}'}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    reasoning = {"reasoning": "hm", "reasoning_content": "hm"}
    calls = {"tool_calls": [_CALL]}
    for items, expected in (
        ([said("a"), said("b")], [said("a"), said("b")]),
        ([said("a"), call, said("b")], [{**said("ab"), **calls}]),
        (
            [said("a"), thought, call],
            [said("a"), {**said(""), "content": None, **reasoning, **calls}],
        ),
    ):
        assert chat_of_response({"input": items})["messages"] == expected


def test_results_of_tools_keep_their_place_among_parts_of_the_user():
    text = {"type": "text", "text": "hi"}
    result = {"type": "tool_result", "tool_use_id": "c1"}

    chat = chat_of_message({"messages": [{"role": "user", "content": [text, result, text]}]})

    tool = {"role": "tool", "tool_call_id": "c1", "content": ""}
    assert chat["messages"] == [_HI, tool, _HI]


def asked(**fields: Any) -> dict[str, Any]:
    return {"messages": [_HI], **fields}


def user(block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


def sent(content: Any, **fields: Any) -> dict[str, Any]:
    return {"input": content, **fields}


_WRONG_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "4"}]}, "messages[0].role"),
    ({"messages": [_HI, {"role": "assistant", "content": "4"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 4}]}, "messages[0].content"),
    (user({"type": "document", "source": {}}), "messages[0].content[0].type"),
    (user({"type": ["text"]}), "messages[0].content[0].type"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"type": "image"}), "messages[0].content[0].source"),
    (user({"type": "image", "source": {"type": "file"}}), "messages[0].content[0].source.type"),
    (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
        "messages[0].content[0].input",
    ),
    (asked(stop_sequences="END"), "stop_sequences"),
    (asked(stop_sequences=[1]), "stop_sequences[0]"),
    (asked(tools=[{"type": "bash_20250124", "name": "b"}]), "tools[0].type"),
    (asked(tools=[{"name": "f", "input_examples": [{}]}]), "tools[0].input_examples"),
    (asked(tool_choice={"type": ["auto"]}), "tool_choice.type"),
    (asked(tool_choice={"type": "some"}), "tool_choice.type"),
    (asked(output_config={"format": {"type": "x"}}), "output_config.format.type"),
    (
        asked(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}),
        "context_management.edits[0]",
    ),
    (asked(mcp_servers=[{}]), "mcp_servers"),
    (asked(container="c"), "container"),
    (asked(n=2), "n"),
]  # fmt: skip

_WRONG_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    (sent([{"type": "item_reference", "id": "x"}]), "input[0].type"),
    (sent([{"type": "custom_tool_call"}]), "input[0].type"),
    (sent([{"role": "tool", "content": "x"}]), "input[0].role"),
    (sent([{"role": ["user"], "content": "x"}]), "input[0].role"),
    (sent([{"role": "assistant", "type": "x", "content": "x"}]), "input[0].type"),
    (sent([{"role": "user", "content": [{"type": "input_file"}]}]), "input[0].content[0].type"),
    (
        sent([{"role": "user", "content": [{"type": "input_image"}]}]),
        "input[0].content[0].image_url",
    ),
    (sent([{"type": "function_call", "name": "f"}]), "input[0].arguments"),
    (sent([{"type": "function_call_output", "output": "x"}]), "input[0].call_id"),
    (sent([{"type": "reasoning", "encrypted_content": "x"}]), "input[0].encrypted_content"),
    (sent("hi", previous_response_id="resp_1"), "previous_response_id"),
    (sent("hi", conversation="conv_1"), "conversation"),
    (sent("hi", prompt={"id": "p"}), "prompt"),
    (sent("hi", background=True), "background"),
    (sent("hi", truncation="auto"), "truncation"),
    (sent("hi", top_logprobs=2), "top_logprobs"),
    (sent("hi", include=["message.output_text.logprobs"]), "include[0]"),
    (sent("hi", instructions=["be brief"]), "instructions"),
    (sent("hi", tools=[{"type": "web_search"}]), "tools[0].type"),
    (sent("hi", tools=[{"type": "function"}]), "tools[0].name"),
    (sent("hi", tool_choice={"type": "allowed_tools"}), "tool_choice.type"),
    (sent("hi", tool_choice=1), "tool_choice"),
    (sent("hi", text={"verbosity": "low"}), "text.verbosity"),
    (sent("hi", text={"format": {"type": "grammar"}}), "text.format.type"),
    (sent("hi", reasoning="low"), "reasoning"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("translate", "body", "field"),
    [
        *[pytest.param(chat_of_message, *each, id=f"m-{each[1]}") for each in _WRONG_MESSAGES],
        *[pytest.param(chat_of_response, *each, id=f"r-{each[1]}") for each in _WRONG_RESPONSES],
    ],
)
def test_field_without_a_translation_is_named(
    translate: Callable[[Any], Any], body: dict[str, Any], field: str
):
    with pytest.raises(InvalidConfigError, match=f"^{re.escape(field)}:") as caught:
        translate(body)

    assert caught.value.field == field


def test_models_are_listed_as_anthropic_does():
    cards = [{"id": "a", "created": 86_400, "max_model_len": 9}, {"id": "b", "created": "x"}]

    listed = listed_models(cards)

    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a", "b", False)
    assert listed["data"][0] == {
        "type": "model",
        "id": "a",
        "display_name": "a",
        "created_at": "1970-01-02T00:00:00+00:00",
        "lifecycle": "active",
        "max_input_tokens": 9,
    }
    assert listed_models([])["first_id"] is None


def test_parts_of_one_answer_are_joined_in_linear_time():
    part = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    start_s = time.process_time()

    (message,) = chat_of_response({"input": [part] * 50_000})["messages"]

    assert time.process_time() - start_s < 1
    assert len(message["reasoning"]) == 100_000
