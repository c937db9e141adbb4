"""Answers as messages and responses: the stream of an answer ends as the whole answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnstream_server.gateway.proxy.answer_blocks import BlockFormat
from turnstream_server.gateway.proxy.anthropic_api import MessageFormat
from turnstream_server.gateway.proxy.requests import chunks_of
from turnstream_server.gateway.proxy.responses_api import ResponseFormat
from turnstream_server.gateway.proxy.sse import EventReader

_CHAT = {"model": "policy", "stop": ["END"], "max_tokens": 9, "tool_choice": "auto"}
_REQUEST: Any = {"model": "policy", "max_tokens": 9, "messages": []}
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
_JSON = st.dictionaries(_TEXT, st.none() | st.integers() | _TEXT | st.lists(_TEXT), max_size=2)


def answer_of(
    *, content: str = "", reasoning: str = "", calls: Any = (), **fields: Any
) -> dict[str, Any]:
    """Return the answer of an engine."""
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"c{place}", "type": "function", "function": {"name": name, "arguments": text}}
            for place, (name, text) in enumerate(calls)
        ]
    choice = {"index": 0, "message": message, "finish_reason": "stop", **fields}
    return {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 5,
        "model": "policy-v7",
        "choices": [choice],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
        "prompt_token_ids": [1, 2, 3],
    }


def cut(response: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream with texts of at most `size` characters."""
    for chunk in chunks_of(response):
        for choice in chunk["choices"]:
            yield {**chunk, "choices": []}
            for delta in _deltas(choice["delta"], size):
                part = {"index": 0, "delta": delta, "finish_reason": None}
                yield {**chunk, "choices": [part]}
            choice["delta"] = {}
        yield chunk


def _deltas(delta: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    for name in ("reasoning", "content"):
        yield from ({name: part} for part in _cut(delta.get(name) or "", size))
    for call in delta.get("tool_calls") or ():
        function = call["function"]
        yield {"tool_calls": [{**call, "function": {"name": function["name"], "arguments": ""}}]}
        for part in _cut(function["arguments"], size):
            yield {"tool_calls": [{"index": call["index"], "function": {"arguments": part}}]}


def _cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def streamed(form: BlockFormat, response: dict[str, Any], size: int) -> bytes:
    """Return the body of a stream."""
    return b"".join([*map(form.chunk, cut(response, size)), form.end()])


class Answers:
    """A server in memory, and the clients of agents that read its answers."""

    def __init__(self) -> None:
        self._body = b""
        self._type = ""
        transport = httpx2.MockTransport(lambda _: httpx2.Response(200, **self._sent()))
        http = httpx2.Client(transport=transport, verify=False)
        self._openai = openai.OpenAI(api_key="k", http_client=http)
        self._anthropic = anthropic.Anthropic(api_key="k", http_client=http)

    def _sent(self) -> dict[str, Any]:
        return {"content": self._body, "headers": {"content-type": self._type}}

    def whole(self, form: BlockFormat, answer: dict[str, Any]) -> Any:
        """Return what a client makes of a whole answer."""
        self._body, self._type = json.dumps(form.whole(answer)).encode(), "application/json"
        if isinstance(form, ResponseFormat):
            return fields_of(self._openai.responses.create(model="policy", input="hi"))
        return fields_of(self._anthropic.messages.create(**_REQUEST))

    def ended(self, form: BlockFormat, answer: dict[str, Any], size: int) -> Any:
        """Return what a client makes of the stream of an answer."""
        self._body, self._type = streamed(form, answer, size), "text/event-stream"
        if isinstance(form, ResponseFormat):
            with self._openai.responses.stream(model="policy", input="hi") as events:
                last: Any = [*events][-1]
                return fields_of(last.response)
        with self._anthropic.messages.stream(**_REQUEST) as stream:
            return fields_of(stream.get_final_message())


def fields_of(found: Any) -> Any:
    """Return an answer as JSON, without fields that only the helpers for streams set."""
    dumped = found.model_dump(exclude_none=True, warnings=False)
    for each in dumped.get("output", ()):
        each.pop("parsed_arguments", None)
    dumped.pop("created_at", None)
    return dumped


_ANSWERS = Answers()


@settings(max_examples=25)
@given(
    content=_TEXT | st.just(""),
    reasoning=_TEXT | st.just(""),
    calls=st.lists(st.tuples(_TEXT, _JSON.map(json.dumps)), max_size=3),
    reason=st.sampled_from(["stop", "length", "tool_calls"]),
    size=st.integers(1, 5),
)
def test_stream_ends_as_the_whole_answer(
    content: str, reasoning: str, calls: Any, reason: str, size: int
):
    answer = answer_of(content=content, reasoning=reasoning, calls=calls, finish_reason=reason)
    for form in (MessageFormat, ResponseFormat):
        assert _ANSWERS.ended(form(_CHAT), answer, size) == _ANSWERS.whole(form(_CHAT), answer)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({"finish_reason": "stop"}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "stop", "matched_stop": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "stop", "stop_reason": "</s>"}, ("end_turn", None)),
        ({"finish_reason": "stop", "matched_stop": 257}, ("end_turn", None)),
        ({"finish_reason": "stop", "calls": [("f", "{}")]}, ("tool_use", None)),
        ({"finish_reason": "tool_calls", "calls": [("f", "{}")]}, ("tool_use", None)),
        ({"finish_reason": "length"}, ("max_tokens", None)),
    ],
)
def test_message_says_why_it_has_ended(ends: dict[str, Any], expected: tuple[str, str | None]):
    message = MessageFormat(_CHAT).whole(answer_of(content="4", **ends))

    assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_response_without_room_for_its_end_is_incomplete():
    for reason, status in (("length", "incomplete"), ("stop", "completed")):
        answer = answer_of(content="4", reasoning="hm", finish_reason=reason)
        events = EventReader().feed(streamed(ResponseFormat(_CHAT), answer, 9))
        response = events[-1].json()["response"]

        assert [events[-1].name, response["status"]] == [f"response.{status}", status]
        assert [each["status"] for each in response["output"]] == ["completed", status]
        assert (response["incomplete_details"] is None) == (reason == "stop")


def test_events_of_a_message_are_in_the_order_of_the_api():
    answer = answer_of(content="ok", reasoning="hm", calls=[("f", '{"x": 1}')])
    events = EventReader().feed(streamed(MessageFormat(_CHAT), answer, 9))

    delta = ["content_block_start", "content_block_delta", "content_block_stop"]
    names = ["message_start", "ping", *delta * 3, "message_delta", "message_stop"]
    assert [event.name for event in events] == names
    assert events[0].json()["message"]["usage"] == {"input_tokens": 3, "output_tokens": 0}
    assert events[-2].json()["usage"] == {"input_tokens": 3, "output_tokens": 4}


def test_events_of_a_response_are_numbered_in_the_order_of_the_api():
    answer = answer_of(content="ok", reasoning="hm", calls=[("f", '{"x": 1}')])
    events = EventReader().feed(streamed(ResponseFormat(_CHAT), answer, 9))

    item, part = "output_item", "content_part"
    texts = [
        [f"{item}.added", f"{part}.added", f"{kind}.delta", f"{kind}.done", f"{part}.done"]
        for kind in ("reasoning_text", "output_text")
    ]
    call = "function_call_arguments"
    names = [
        *("created", "in_progress"),
        *(*texts[0], f"{item}.done", *texts[1], f"{item}.done"),
        *(f"{item}.added", f"{call}.delta", f"{call}.done", f"{item}.done", "completed"),
    ]
    assert [event.name for event in events] == [f"response.{name}" for name in names]
    assert [event.json()["sequence_number"] for event in events] == [*range(len(events))]
    outputs = events[-1].json()["response"]["output"]
    assert [each["type"] for each in outputs] == ["reasoning", "message", "function_call"]


def test_arguments_that_are_no_object_reach_the_agent():
    for text in ("{", "[1]"):
        message = MessageFormat(_CHAT).whole(answer_of(calls=[("f", text)]))
        assert message["content"][0]["input"] == {"INVALID_JSON": text}


@pytest.mark.parametrize("form", [MessageFormat, ResponseFormat])
def test_error_after_the_begin_of_a_stream_is_an_event(form: type[BlockFormat]):
    reader: Any = form(_CHAT)
    _ = [*map(reader.chunk, cut(answer_of(content="ok"), 1))]
    content = {"error": {"message": "cut", "type": "server_error", "param": None, "code": "x"}}

    (event,) = EventReader().feed(reader.error_event(502, content))

    assert event.name == event.json()["type"] == "error"
    assert event.json()["error"]["message"] == "cut"
