"""The model of an engine double: a byte tokenizer, a chat template, and samples from the prompt.

Token ids below 256 are bytes. The text of a sample is rendered again to the same tokens, so the
next prompt of a conversation continues the earlier one, unless `drops_reasoning` is set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

SPECIAL: Final = {
    "<|im_start|>": 256,
    "<|im_end|>": 257,
    "<tool_call>": 258,
    "</tool_call>": 259,
    "<think>": 260,
    "</think>": 261,
}
_TEXTS: Final = {number: text for text, number in SPECIAL.items()}
END: Final = SPECIAL["<|im_end|>"]
TOOL, TOOL_END = SPECIAL["<tool_call>"], SPECIAL["</tool_call>"]
THINK, THINK_END = SPECIAL["<think>"], SPECIAL["</think>"]
_LETTERS: Final = b"abcdefghijklmnopqrstuvwxyz "


@dataclass(slots=True)
class Knobs:
    """The behaviour of a double; each value can be changed while it serves.

    Attributes:
        model: name of its model.
        api_key: a bearer token that calls need; empty: none.
        weight_version: label of the weights.
        next_version: label of the weights after `version_tokens` tokens of each answer.
        version_tokens: see `next_version`.
        replies: texts of the next answers, in place of sampled ones.
        thinks: answers begin with a reasoning.
        calls_tools: answers to calls with tools call the first tool.
        drops_reasoning: the template omits the reasoning of earlier answers.
        delay_s: seconds before each token.
        die_after: tokens after which the connection, or the process, ends; None: never.
        cut_done: the last event of streams is missing.
        fail: statuses of the next calls.
        is_paused: calls get 503.
        usage_offset: added to the number of sampled tokens in the usage.
        omit_logprobs: answers have no log-probabilities.
        finish_reason: reason in place of the true one; empty for the true one.
        max_length: most tokens of prompt and answer.
    """

    model: str = "policy"
    api_key: str = ""
    weight_version: str = "7"
    next_version: str = ""
    version_tokens: int = 0
    replies: list[str] = field(default_factory=list[str])
    thinks: bool = False
    calls_tools: bool = False
    drops_reasoning: bool = False
    delay_s: float = 0.0
    die_after: int | None = None
    cut_done: bool = False
    fail: list[int] = field(default_factory=list[int])
    is_paused: bool = False
    usage_offset: int = 0
    omit_logprobs: bool = False
    finish_reason: str = ""
    max_length: int = 65_536


@dataclass(frozen=True, slots=True)
class Sample:
    """One choice: its tokens, and the reason of its end."""

    ids: list[int]
    finish_reason: str
    stop: str = ""


def encode(text: str) -> list[int]:
    """Return the tokens of a text; special tokens in it are one token each."""
    ids: list[int] = []
    while text:
        found = [(place, each) for each in SPECIAL if (place := text.find(each)) >= 0]
        place, special = min(found, default=(len(text), ""))
        ids += text[:place].encode()
        if special:
            ids.append(SPECIAL[special])
        text = text[place + len(special) :]
    return ids


def decode(ids: Iterable[int], *, with_special: bool = False) -> str:
    """Return the text of tokens, without special ones by default."""
    parts = [
        bytes([each]) if each < 256 else _TEXTS[each].encode() if with_special else b""
        for each in ids
    ]
    return b"".join(parts).decode(errors="replace")


def logprob(token: int) -> float:
    """Return the log-probability of a token, the same at each position."""
    return -(1 + token % 7) / 8


def render(body: Mapping[str, Any], knobs: Knobs) -> list[int]:
    """Return the prompt of a chat completion."""
    text = "".join(_message(each, knobs) for each in body["messages"])
    return encode(f"{text}<|im_start|>assistant\n")


def _message(message: Mapping[str, Any], knobs: Knobs) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(each.get("text", "") for each in content)
    for call in message.get("tool_calls") or ():
        function = call["function"]
        content += f"<tool_call>{_call(function['name'], function['arguments'])}</tool_call>"
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning and not knobs.drops_reasoning:
        content = f"<think>{reasoning}</think>{content}"
    return f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"


def _call(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'


def prompt_of(body: Mapping[str, Any], knobs: Knobs) -> list[int]:
    """Return the prompt of a body, tokens or text."""
    if "messages" in body:
        return render(body, knobs)
    prompt = body["prompt"]
    if prompt and isinstance(prompt, list) and not isinstance(prompt[0], int):
        (prompt,) = prompt
    return encode(prompt) if isinstance(prompt, str) else prompt


def sample(body: Mapping[str, Any], prompt: Sequence[int], index: int, knobs: Knobs) -> Sample:
    """Return a choice: the next of `replies`, else one made of prompt, seed and index."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or knobs.max_length
    limit = min(limit, knobs.max_length - len(prompt))
    ids = [*encode(_text(body, prompt, index, knobs)), END][:limit]
    reason = "stop" if ids[-1] == END else "length"
    stops = body.get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        for count in range(1, len(ids) + 1):
            if stop in decode(ids[:count]):
                return Sample(ids[:count], "stop", stop)
    if {TOOL, TOOL_END} <= {*ids} and reason == "stop":
        reason = "tool_calls"
    return Sample(ids, knobs.finish_reason or reason)


def _text(body: Mapping[str, Any], prompt: Sequence[int], index: int, knobs: Knobs) -> str:
    if knobs.replies:
        return knobs.replies.pop(0)
    named = json.dumps([list(prompt), body.get("seed"), index]).encode()
    digest = hashlib.sha256(named).digest()
    letters = bytes(_LETTERS[each % len(_LETTERS)] for each in digest)
    text = letters[: 4 + digest[0] % 12].decode()
    if knobs.calls_tools and body.get("tools"):
        name = body["tools"][0]["function"]["name"]
        text = f"<tool_call>{_call(name, json.dumps({'x': text}))}</tool_call>"
    return f"<think>{letters[16:24].decode()}</think>{text}" if knobs.thinks else text


@dataclass(slots=True)
class Parsed:
    """The parts of an answer: its reasoning, its content and its tool calls."""

    reasoning: str | None
    content: str
    tool_calls: list[dict[str, Any]]


def parse(ids: Sequence[int], *, stop: str = "") -> Parsed:
    """Return the parts of an answer, of which `ids` may be the beginning."""
    parts: dict[int, list[int]] = {0: [], THINK: [], TOOL: []}
    calls: list[list[int]] = []
    place = 0
    for each in ids:
        if each in (THINK, TOOL):
            place = each
        elif each in (THINK_END, TOOL_END):
            if each == TOOL_END:
                calls.append(parts[TOOL])
                parts[TOOL] = []
            place = 0
        elif each != END:
            parts[place].append(each)
    content = decode(parts[0])
    if stop and stop in content:
        content = content[: content.index(stop)]
    reasoning = decode(parts[THINK]) if THINK in ids else None
    return Parsed(reasoning, content, [_tool_call(each, at) for at, each in enumerate(calls)])


def _tool_call(ids: Sequence[int], place: int) -> dict[str, Any]:
    text = decode(ids)
    name = json.loads(text)["name"]
    arguments = text.partition('"arguments": ')[2][:-1]
    number = hashlib.sha256(text.encode()).hexdigest()[:8]
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}_{place}", "type": "function", "function": function}


def version_spans(num_tokens: int, knobs: Knobs) -> list[dict[str, Any]]:
    """Return the versions of an answer, as vLLM does."""
    change = min(knobs.version_tokens, num_tokens) if knobs.next_version else num_tokens
    spans = [
        {"version": knobs.weight_version, "start": 0, "end": change},
        {"version": knobs.next_version, "start": change, "end": num_tokens},
    ]
    return [each for each in spans if each["start"] < each["end"]]
