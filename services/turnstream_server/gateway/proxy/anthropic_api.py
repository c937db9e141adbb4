"""Messages of the API of Anthropic as chat completions, and their answers as messages.

The shapes are those of the package `anthropic` 2.14.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from pydantic_core import from_json

from turnstream.errors import InvalidConfigError
from turnstream_server.gateway.proxy.answer_blocks import Block, BlockFormat, Event
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
from turnstream_server.gateway.proxy.errors import anthropic_content
from turnstream_server.gateway.proxy.sse import event_bytes

_TRANSLATED: Final = (
    "context_management",
    "max_tokens",
    "messages",
    "output_config",
    "stop_sequences",
    "system",
    "tool_choice",
    "tools",
)
_IGNORED: Final = (
    "betas",
    "cache_control",
    "diagnostics",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "thinking",
    "user_profile_id",
    "workspace_id",
)
"""Fields that change no prompt. The chat template of a model says whether it reasons."""

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def chat_of_message(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat completion for a request of a message.

    >>> chat_of_message({"messages": [{"role": "user", "content": "hi"}], "stop_sequences": ["."]})
    {'messages': [{'role': 'user', 'content': 'hi'}], 'stop': ['.']}

    Raises:
        InvalidConfigError: a field has a wrong type, or no translation; `field` is its path.
    """
    chat = engine_options(body, translated=_TRANSLATED, ignored=_IGNORED)
    given = {name: body[name] for name in _TRANSLATED if body.get(name) is not None}
    chat["messages"] = [*_system(given.get("system")), *_messages(given.get("messages"))]
    if "max_tokens" in given:
        chat["max_tokens"] = given["max_tokens"]
    if stops := given.get("stop_sequences"):
        chat["stop"] = texts(stops, "stop_sequences")
    if tools := given.get("tools"):
        chat["tools"] = [_tool(each, path) for path, each in objects(tools, "tools")]
    if "tool_choice" in given:
        chat |= _tool_choice(as_object(given["tool_choice"], "tool_choice"))
    if "output_config" in given:
        chat |= _output(as_object(given["output_config"], "output_config"))
    if "context_management" in given:
        _check_context(as_object(given["context_management"], "context_management"))
    return chat


def _system(system: object) -> Iterator[dict[str, Any]]:
    if system:
        yield {"role": "system", "content": _content(system, "system")}


def _messages(messages: object) -> Iterator[dict[str, Any]]:
    role = None
    for path, message in objects(messages, "messages"):
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            yield _assistant(content, f"{path}.content")
        elif role in ("user", "system"):
            yield from _others(role, content, f"{path}.content")
        else:
            raise InvalidConfigError(f"{path}.role", f"{role!r} is not user, assistant or system")
    if role == "assistant":
        why = "the answer to a chat completion begins a message, and cannot continue the last one"
        raise unsupported("messages", "assistant", why)


def _assistant(content: object, field: str) -> dict[str, Any]:
    """Return the chat message of an earlier answer; its text parts are joined again."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    content_texts, reasoning = list[str](), list[str]()
    calls: list[dict[str, Any]] = []
    for path, block in objects(content, field):
        kind = block.get("type")
        if kind == "text":
            content_texts.append(as_text(block.get("text"), f"{path}.text"))
        elif kind == "thinking":
            reasoning.append(as_text(block.get("thinking"), f"{path}.thinking"))
        elif kind == "tool_use":
            calls.append(_call(block, path))
        else:
            raise unsupported(f"{path}.type", kind)
    return answer_message(content_texts, reasoning=reasoning, calls=calls)


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    arguments = as_object(block.get("input"), f"{path}.input")
    function = {
        "name": as_text(block.get("name"), f"{path}.name"),
        "arguments": json.dumps(arguments, ensure_ascii=False),
    }
    call_id = as_text(block.get("id"), f"{path}.id")
    return {"id": call_id, "type": "function", "function": function}


def _others(role: str, content: object, field: str) -> Iterator[dict[str, Any]]:
    """Yield the chat messages for one of the user: results of tools are messages of their own."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    parts: list[dict[str, Any]] = []
    for path, block in objects(content, field):
        if block.get("type") != "tool_result":
            parts.append(_part(block, path))
            continue
        if parts:
            yield {"role": role, "content": joined_parts(parts)}
            parts = []
        call_id = as_text(block.get("tool_use_id"), f"{path}.tool_use_id")
        result = _content(block.get("content") or "", f"{path}.content")
        yield {"role": "tool", "tool_call_id": call_id, "content": result}
    if parts:
        yield {"role": role, "content": joined_parts(parts)}


def _content(content: object, field: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return joined_parts([_part(block, path) for path, block in objects(content, field)])


def _part(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": as_text(block.get("text"), f"{path}.text")}
    if kind != "image":
        raise unsupported(f"{path}.type", kind)
    source = as_object(block.get("source"), f"{path}.source")
    if source.get("type") == "url":
        url = as_text(source.get("url"), f"{path}.source.url")
    elif source.get("type") == "base64":
        media_type = as_text(source.get("media_type"), f"{path}.source.media_type")
        url = f"data:{media_type};base64,{as_text(source.get('data'), f'{path}.source.data')}"
    else:
        raise unsupported(f"{path}.source.type", source.get("type"))
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if (kind := tool.get("type")) not in (None, "custom"):
        raise unsupported(f"{path}.type", kind, "the gateway runs no tools")
    for name in ("defer_loading", "input_examples"):
        if tool.get(name):
            raise unsupported(f"{path}.{name}", tool[name])
    return chat_tool(tool, path, parameters="input_schema")


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind, chat = as_text(choice.get("type"), "tool_choice.type"), dict[str, Any]()
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    if kind == "tool":
        name = as_text(choice.get("name"), "tool_choice.name")
        return {**chat, "tool_choice": {"type": "function", "function": {"name": name}}}
    if kind not in _CHOICES:
        raise unsupported("tool_choice.type", kind)
    return {**chat, "tool_choice": _CHOICES[kind]}


def _output(config: Mapping[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if (effort := config.get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if (wanted := config.get("format")) is not None:
        wanted = as_object(wanted, "output_config.format")
        if wanted.get("type") != "json_schema":
            raise unsupported("output_config.format.type", wanted.get("type"))
        schema = {"name": "output", "schema": wanted.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _check_context(context: Mapping[str, Any]) -> None:
    """Refuse edits of the prompt, but for the one that keeps everything."""
    edits = context.get("edits") or []
    for path, edit in objects(edits, "context_management.edits"):
        if edit.get("keep") != "all":
            raise unsupported(path, edit.get("type"), "the gateway edits no prompt")


class MessageFormat(BlockFormat):
    """The answer to a request of a message."""

    def answer(self) -> Event:
        """Return the message so far; without its end it has no reason to stop."""
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [_block(each) for each in self.blocks],
            **self._stop(),
            "usage": {
                "input_tokens": self.num_prompt_tokens,
                "output_tokens": self.num_sampled_tokens,
            },
        }

    def begun(self) -> list[Event]:
        """Return the events before all others."""
        return [{"type": "message_start", "message": self.answer()}, {"type": "ping"}]

    def opened(self, block: Block) -> list[Event]:
        """Return the events for the start of a block."""
        start = {"type": "content_block_start", "index": block.index}
        return [{**start, "content_block": _block(block)}]

    def grown(self, block: Block, text: str) -> list[Event]:
        """Return the events for more text of a block."""
        deltas = {
            "text": {"type": "text_delta", "text": text},
            "reasoning": {"type": "thinking_delta", "thinking": text},
            "call": {"type": "input_json_delta", "partial_json": text},
        }
        delta = deltas[block.kind]
        return [{"type": "content_block_delta", "index": block.index, "delta": delta}]

    def closed(self, block: Block) -> list[Event]:
        """Return the events for the end of a block."""
        return [{"type": "content_block_stop", "index": block.index}]

    def ended(self) -> list[Event]:
        """Return the events after all others."""
        usage = self.answer()["usage"]
        end = {"type": "message_delta", "delta": self._stop(), "usage": usage}
        return [end, {"type": "message_stop"}]

    def error(self, status: int, content: Mapping[str, Any]) -> Event:
        """Return the body of an error."""
        return anthropic_content(status, content)

    def error_event(self, status: int, content: Mapping[str, Any]) -> bytes:
        """Return an error as the last event of a stream."""
        return event_bytes(anthropic_content(status, content), name="error")

    def _stop(self) -> Event:
        reason = _REASONS.get(self.finish_reason)
        if reason == "end_turn" and self.stop in (self.chat.get("stop") or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop}
        if reason == "end_turn" and any(each.kind == "call" for each in self.blocks):
            reason = "tool_use"  # an engine that was told which tool to call
        return {"stop_reason": reason, "stop_sequence": None}


def _block(block: Block) -> Event:
    """Return a block as JSON.

    Arguments that are no JSON object are the value of `INVALID_JSON`: the agent sees the error.
    """
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        found = from_json(block.text or "{}")
    except ValueError:
        found = None
    arguments = found if isinstance(found, dict) else {"INVALID_JSON": block.text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def _created_s(card: Mapping[str, Any]) -> int:
    created = card.get("created")
    return created if isinstance(created, int) else 0


def listed_models(cards: Sequence[Mapping[str, Any]]) -> Event:
    """Return the answer to a request for all models."""
    data = [
        {
            "type": "model",
            "id": card.get("id"),
            "display_name": card.get("id"),
            "created_at": datetime.fromtimestamp(_created_s(card), UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": card.get("max_model_len"),
        }
        for card in cards
    ]
    ids = [each["id"] for each in data] or [None]
    return {"data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}
