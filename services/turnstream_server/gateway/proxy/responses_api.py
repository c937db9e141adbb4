"""Requests of the Responses API of OpenAI as chat completions, and their answers as responses.

The shapes are those of the package `openai` 3.57. Nothing is stored for a later request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from turnstream.errors import InvalidConfigError
from turnstream_server.gateway.proxy.answer_blocks import Block, BlockFormat, Event
from turnstream_server.gateway.proxy.answers import message_of
from turnstream_server.gateway.proxy.body_fields import (
    answer_message,
    as_object,
    as_text,
    chat_tool,
    engine_options,
    joined_parts,
    objects,
    texts,
    unsupported,
)
from turnstream_server.gateway.proxy.sse import event_bytes

_TRANSLATED: Final = (
    "background",
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
    "truncation",
)
_IGNORED: Final = (
    "max_tool_calls",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
)
"""Fields that change no prompt."""

_ROLES: Final = {"user": "user", "system": "system", "developer": "system"}
_ITEM_IDS: Final = {"text": "msg", "reasoning": "rs", "call": "fc"}
_TEXTS: Final = ("input_text", "output_text", "text")
_HARMLESS: Final = {"background": False, "truncation": "disabled"}
"""Values of unsupported fields that change nothing."""

_RENAMED: Final = {
    "max_output_tokens": "max_tokens",
    "parallel_tool_calls": "parallel_tool_calls",
}


def chat_of_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat completion for a request of a response.

    >>> chat_of_response({"input": "hi", "max_output_tokens": 9})
    {'messages': [{'role': 'user', 'content': 'hi'}], 'max_tokens': 9}

    Raises:
        InvalidConfigError: a field has a wrong type, or no translation; `field` is its path.
    """
    chat = engine_options(body, translated=_TRANSLATED, ignored=_IGNORED)
    given = {name: body[name] for name in _TRANSLATED if body.get(name) is not None}
    for name, harmless in _HARMLESS.items():
        if given.get(name, harmless) != harmless:
            raise unsupported(name, given[name])
    for place, each in enumerate(texts(given.get("include", []), "include")):
        if each != "reasoning.encrypted_content":
            raise unsupported(f"include[{place}]", each)
    chat["messages"] = _messages(given)
    for name, target in _RENAMED.items():
        if name in given:
            chat[target] = given[name]
    if tools := given.get("tools"):
        chat["tools"] = [_tool(each, path) for path, each in objects(tools, "tools")]
    if "tool_choice" in given:
        chat["tool_choice"] = _tool_choice(given["tool_choice"])
    effort = as_object(given.get("reasoning", {}), "reasoning").get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    return chat | _text_format(as_object(given.get("text", {}), "text"))


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any] | _EarlierAnswer] = []
    if "instructions" in given:
        text = as_text(given["instructions"], "instructions")
        messages.append({"role": "system", "content": text})
    items = given.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    answer: _EarlierAnswer | None = None
    for path, item in objects(items, "input"):
        if _is_of_answer(item):
            if answer is None or answer.ends_before(item):
                answer = _EarlierAnswer()
                messages.append(answer)
            answer.add(item, path)
        else:
            answer = None
            messages.append(_message(item, path))
    return [each.message() if isinstance(each, _EarlierAnswer) else each for each in messages]


def _is_of_answer(item: Mapping[str, Any]) -> bool:
    """Return whether an item is a part of an answer, and not a message or a result of a tool."""
    return item.get("type") in ("function_call", "reasoning") or item.get("role") == "assistant"


class _EarlierAnswer:
    """One chat message out of the items of an answer: reasoning, text and calls."""

    def __init__(self) -> None:
        self._last = ""
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def ends_before(self, item: Mapping[str, Any]) -> bool:
        """Return whether an item begins the next answer."""
        kind = item.get("type") or "message"
        return kind == self._last == "message" or (kind == "reasoning" and self._last != kind)

    def add(self, item: Mapping[str, Any], path: str) -> None:
        """Add the next item."""
        self._last = item.get("type") or "message"
        if self._last == "reasoning":
            self._reasoning += _reasoning(item, path)
        elif self._last == "function_call":
            self._calls.append(_call(item, path))
        elif self._last == "message":
            content = _content(item.get("content"), f"{path}.content")
            parts = [{"text": content}] if isinstance(content, str) else content
            self._texts += [as_text(part.get("text"), f"{path}.content") for part in parts]
        else:
            raise unsupported(f"{path}.type", self._last)

    def message(self) -> dict[str, Any]:
        """Return the message."""
        return answer_message(self._texts, reasoning=self._reasoning, calls=self._calls)


def _reasoning(item: Mapping[str, Any], path: str) -> list[str]:
    content = item.get("content")
    if not content and item.get("encrypted_content"):
        raise unsupported(f"{path}.encrypted_content", "a text", "only content can be read")
    parts = objects(content or [], f"{path}.content")
    return [as_text(part.get("text"), f"{place}.text") for place, part in parts]


def _call(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    function = {name: as_text(item.get(name), f"{path}.{name}") for name in ("name", "arguments")}
    call_id = as_text(item.get("call_id"), f"{path}.call_id")
    return {"id": call_id, "type": "function", "function": function}


def _message(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        call_id = as_text(item.get("call_id"), f"{path}.call_id")
        output = _content(item.get("output"), f"{path}.output")
        return {"role": "tool", "tool_call_id": call_id, "content": output}
    if kind != "message":
        raise unsupported(f"{path}.type", kind)
    if (role := as_text(item.get("role"), f"{path}.role")) not in _ROLES:
        raise InvalidConfigError(f"{path}.role", f"{role!r} is not one of {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": _content(item.get("content"), f"{path}.content")}


def _content(content: object, field: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return joined_parts([_part(part, path) for path, part in objects(content, field)])


def _part(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in _TEXTS:
        return {"type": "text", "text": as_text(part.get("text"), f"{path}.text")}
    if kind != "input_image":
        raise unsupported(f"{path}.type", kind)
    image = {"url": as_text(part.get("image_url"), f"{path}.image_url")}
    if (detail := part.get("detail")) is not None:
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if (kind := tool.get("type")) != "function":
        raise unsupported(f"{path}.type", kind, "the gateway runs no tools; use function")
    return chat_tool(tool, path, parameters="parameters")


def _tool_choice(choice: object) -> object:
    if choice in ("auto", "none", "required"):
        return choice
    choice = as_object(choice, "tool_choice")
    if choice.get("type") != "function":
        raise unsupported("tool_choice.type", choice.get("type"))
    name = as_text(choice.get("name"), "tool_choice.name")
    return {"type": "function", "function": {"name": name}}


def _text_format(text: Mapping[str, Any]) -> dict[str, Any]:
    if text.get("verbosity") not in (None, "medium"):
        raise unsupported("text.verbosity", text["verbosity"])
    wanted = as_object(text.get("format") or {"type": "text"}, "text.format")
    kind = wanted.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if kind != "json_schema":
        raise unsupported("text.format.type", kind)
    schema = {name: value for name, value in wanted.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


class ResponseFormat(BlockFormat):
    """The answer to a request of a response."""

    def __init__(self, chat: Mapping[str, Any]) -> None:
        super().__init__(chat)
        self._created_s = time.time()
        self._number = 0

    def answer(self) -> Event:
        """Return the response so far; neither tools nor instructions are repeated."""
        chat, is_cut = self.chat, self.finish_reason == "length"
        status = ("incomplete" if is_cut else "completed") if self.finish_reason else "in_progress"
        choice = chat.get("tool_choice") or "auto"
        if not isinstance(choice, str):
            choice = {"type": "function", "name": choice["function"]["name"]}
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": int(self._created_s),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": None,
            "max_output_tokens": chat.get("max_tokens"),
            "metadata": {},
            "model": self.model,
            "output": [self._item(each) for each in self.blocks],
            "parallel_tool_calls": chat.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "store": False,
            "temperature": chat.get("temperature"),
            "tool_choice": choice,
            "tools": [],
            "top_p": chat.get("top_p"),
            "truncation": "disabled",
            "usage": self._usage() if self.finish_reason else None,
        }

    def begun(self) -> list[Event]:
        """Return the events before all others."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self.answer()) for kind in kinds]

    def opened(self, block: Block) -> list[Event]:
        """Return the events for the start of a block."""
        item = {**self._item(block), "status": "in_progress"}
        if block.kind == "call":
            return [self._item_event("response.output_item.added", block, item=item)]
        item["content"] = []
        return [
            self._item_event("response.output_item.added", block, item=item),
            self._part_event("response.content_part.added", block, part=_part_of(block)),
        ]

    def grown(self, block: Block, text: str) -> list[Event]:
        """Return the events for more text of a block."""
        return [self._text_event("delta", block, delta=text)]

    def closed(self, block: Block) -> list[Event]:
        """Return the events for the end of a block."""
        if block.kind == "call":
            events = [self._text_event("done", block, arguments=block.text)]
        else:
            events = [
                self._text_event("done", block, text=block.text),
                self._part_event("response.content_part.done", block, part=_part_of(block)),
            ]
        done = self._item_event("response.output_item.done", block, item=self._item(block))
        return [*events, done]

    def ended(self) -> list[Event]:
        """Return the events after all others."""
        answer = self.answer()
        return [self._event(f"response.{answer['status']}", response=answer)]

    def error(self, status: int, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body of an error."""
        return content

    def error_event(self, status: int, content: Mapping[str, Any]) -> bytes:
        """Return an error as the last event of a stream.

        It has the error twice: clients read either of them.
        """
        error = content.get("error")
        named = error if isinstance(error, Mapping) else {"message": message_of(content)}
        fields = {name: named.get(name) for name in ("code", "message", "param")}
        return event_bytes(self._event("error", **fields, error=named), name="error")

    def _item(self, block: Block) -> Event:
        is_cut = self.finish_reason == "length" and block is self.blocks[-1]
        head = {"id": self._item_id(block), "status": "incomplete" if is_cut else "completed"}
        if block.kind == "call":
            call = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {**head, "type": "function_call", **call}
        if block.kind == "reasoning":
            head |= {"type": "reasoning", "summary": []}
        else:
            head |= {"type": "message", "role": "assistant"}
        return {**head, "content": [_part_of(block)]}

    def _item_id(self, block: Block) -> str:
        return f"{_ITEM_IDS[block.kind]}_{self.id}_{block.index}"

    def _usage(self) -> Event:
        prompt, sampled = self.num_prompt_tokens, self.num_sampled_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        number = self._number
        self._number += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _item_event(self, kind: str, block: Block, **fields: Any) -> Event:
        return self._event(kind, output_index=block.index, **fields)

    def _part_event(self, kind: str, block: Block, **fields: Any) -> Event:
        return self._item_event(
            kind, block, item_id=self._item_id(block), content_index=0, **fields
        )

    def _text_event(self, step: str, block: Block, **fields: Any) -> Event:
        if block.kind == "call":
            kind = f"response.function_call_arguments.{step}"
            return self._item_event(kind, block, item_id=self._item_id(block), **fields)
        if block.kind == "reasoning":
            return self._part_event(f"response.reasoning_text.{step}", block, **fields)
        return self._part_event(f"response.output_text.{step}", block, logprobs=[], **fields)


def _part_of(block: Block) -> Event:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
