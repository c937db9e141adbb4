"""The answer of an engine as blocks: reasoning, text and tool calls, in the order of their start.

The APIs that are no chat completions have such blocks. `BlockFormat` reads chunks, and a class of
each API makes events of what they add. A whole answer is read as its chunks, so it equals the end
of a stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from turnstream_server.gateway.proxy.requests import Wanted, answered, chunks_of
from turnstream_server.gateway.proxy.sse import DONE, event_bytes

Event = dict[str, Any]


class AnswerFormat(Protocol):
    """How an agent reads the answer to one call."""

    def whole(self, response: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a call without a stream."""
        ...

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """Return the events for the next chunk of a stream; none for one that only we asked for."""
        ...

    def end(self) -> bytes:
        """Return the last events of a stream."""
        ...

    def error(self, status: int, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body of an error, which an engine or the gateway has answered."""
        ...

    def error_event(self, status: int, content: Mapping[str, Any]) -> bytes:
        """Return the same error as the last event of a stream."""
        ...


class PlainFormat:
    """Completions as engines answer them, but for fields that the agent did not ask for.

    Without `wanted` all fields stay.
    """

    def __init__(self, wanted: Wanted | None) -> None:
        self._wanted = wanted

    def whole(self, response: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a call without a stream."""
        return self._answered(response) or {}

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """Return the event for the next chunk of a stream."""
        part = self._answered(chunk)
        return b"" if part is None else event_bytes(part)

    def end(self) -> bytes:
        """Return the last event of a stream."""
        return DONE

    def error(self, status: int, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body of an error."""
        return content

    def error_event(self, status: int, content: Mapping[str, Any]) -> bytes:
        """Return an error as the last event of a stream."""
        return event_bytes(content)

    def _answered(self, part: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return part if self._wanted is None else answered(part, self._wanted)


@dataclass(slots=True, eq=False)
class Block:
    """A part of an answer.

    Attributes:
        index: its place in the answer.
        id: id of a tool call; "" for the other kinds.
        name: name of the called tool; "" for the other kinds.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        """Return its text so far, of a call the JSON of the arguments."""
        return "".join(self.parts)


class BlockFormat(ABC):
    """An API whose answers are blocks. An object reads one answer.

    Attributes:
        id: id of the answer, as the engine has it, without its kind.
        blocks: blocks so far.
        finish_reason: why the answer has ended; "" before.
        stop: the stop sequence that has ended it; "" for none.
        num_prompt_tokens: tokens of the prompt; 0 until they are known.
        num_sampled_tokens: tokens of the answer; 0 until the usage is known.
    """

    def __init__(self, chat: Mapping[str, Any]) -> None:
        self.chat = chat
        self.id = ""
        self.model: Any = chat.get("model")
        self.blocks: list[Block] = []
        self.finish_reason = ""
        self.stop = ""
        self.num_prompt_tokens = 0
        self.num_sampled_tokens = 0
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}
        self._has_begun = False

    @abstractmethod
    def answer(self) -> Event:
        """Return the answer so far."""

    @abstractmethod
    def begun(self) -> list[Event]:
        """Return the events before all others."""

    @abstractmethod
    def opened(self, block: Block) -> list[Event]:
        """Return the events for the start of a block."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> list[Event]:
        """Return the events for more text of a block."""

    @abstractmethod
    def closed(self, block: Block) -> list[Event]:
        """Return the events for the end of a block."""

    @abstractmethod
    def ended(self) -> list[Event]:
        """Return the events after all others."""

    def whole(self, response: Mapping[str, Any]) -> Event:
        """Return the answer to a call without a stream."""
        for chunk in chunks_of(response):
            self.events(chunk)
        self.last_events()
        return self.answer()

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """Return the events for the next chunk of a stream."""
        return _bytes(self.events(chunk))

    def end(self) -> bytes:
        """Return the last events of a stream."""
        return _bytes(self.last_events())

    def events(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Return the events for the next chunk as JSON."""
        choices = [each for each in chunk.get("choices") or () if not each.get("index")]
        self._count(chunk, choices)
        events: list[Event] = []
        if not self._has_begun:
            self._has_begun = True
            self.id = str(chunk.get("id") or "").removeprefix("chatcmpl-")
            self.model = chunk.get("model") or self.model
            events += self.begun()
        for choice in choices:
            events += self._read(choice.get("delta") or {})
            self._finish(choice)
        return events

    def last_events(self) -> list[Event]:
        """Return the events after the last chunk as JSON."""
        return [*self._close(), *self.ended()]

    def _count(self, chunk: Mapping[str, Any], choices: list[Any]) -> None:
        for part in (chunk, *choices):
            if ids := part.get("prompt_token_ids"):
                self.num_prompt_tokens = len(ids)
        if usage := chunk.get("usage"):
            self.num_prompt_tokens = usage.get("prompt_tokens") or 0
            self.num_sampled_tokens = usage.get("completion_tokens") or 0

    def _read(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        if text := delta.get("reasoning") or delta.get("reasoning_content"):
            yield from self._grow("reasoning", text)
        if text := delta.get("content"):
            yield from self._grow("text", text)
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def _grow(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[Event]:
        block = self._open
        if block is None or block.kind != kind:
            block = Block(kind, len(self.blocks))
            yield from self._start(block)
        block.parts.append(text)
        yield from self.grown(block, text)

    def _call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        place, function = call.get("index") or 0, call.get("function") or {}
        block = self._calls.get(place)
        if block is None:
            name = function.get("name") or ""
            block = Block("call", len(self.blocks), call.get("id") or f"call_{place}", name)
            self._calls[place] = block
            yield from self._start(block)
        if text := function.get("arguments"):
            block.parts.append(text)
            yield from self.grown(block, text)

    def _start(self, block: Block) -> Iterator[Event]:
        yield from self._close()
        self._open = block
        self.blocks.append(block)
        yield from self.opened(block)

    def _close(self) -> list[Event]:
        block, self._open = self._open, None
        return [] if block is None else self.closed(block)

    def _finish(self, choice: Mapping[str, Any]) -> None:
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        for name in ("stop_reason", "matched_stop"):  # vLLM has the first, SGLang the second
            if isinstance(stop := choice.get(name), str):
                self.stop = stop


def _bytes(events: list[Event]) -> bytes:
    return b"".join([event_bytes(each, name=each["type"]) for each in events])
