"""Engine doubles: conversations whose prompts continue each other, and faults in the answers."""

from __future__ import annotations

from typing import Any

import pytest

from testkit.services.engine_doubles import EngineDouble, engine_double
from turnstream.errors import InvalidTurnError
from turnstream.responses import from_openai
from turnstream_server.gateway.proxy.engines import EngineAddress, Engines

CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "6 * 7?"}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def chunks_of_call(double: EngineDouble, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks of a chat completion."""
    async with Engines([EngineAddress.parse(double.address)]) as engines:
        asked = {**body, "stream": True}
        async with engines.call("chat/completions", asked, session="s") as answer:
            return [each async for each in answer.chunks()]


def message_of(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, as an agent joins it."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    message.setdefault(name, []).extend(value)
                elif name != "role":
                    message[name] = message.get(name, "") + value
    return message


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_prompts_of_a_conversation_continue_each_other(kind: str) -> None:
    with engine_double(kind, thinks=True, calls_tools=True) as double:
        body = {**CHAT, "tools": TOOLS}
        first = from_openai(chunks := await chunks_of_call(double, body))
        message = message_of(chunks)
        [call] = message["tool_calls"]
        assert call["function"]["name"] == "add"
        assert call["index"] == 0
        assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
        result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
        longer = {**body, "messages": [*body["messages"], message, result]}
        second = from_openai(await chunks_of_call(double, longer))
        prefix = [*first["prompt_ids"], *first["response_ids"]]
        assert second["prompt_ids"][: len(prefix)] == prefix

        double.turn(drops_reasoning=True)
        dropped = from_openai(await chunks_of_call(double, longer))["prompt_ids"]
        assert dropped[: len(first["prompt_ids"])] == first["prompt_ids"]
        assert dropped[: len(prefix)] != prefix


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_faulty_answers_are_no_complete_turns(kind: str) -> None:
    with engine_double(kind, usage_offset=1) as double:
        with pytest.raises(InvalidTurnError, match=r"usage\.completion_tokens"):
            from_openai(await chunks_of_call(double, CHAT))
        double.turn(usage_offset=0, omit_logprobs=True)
        with pytest.raises(InvalidTurnError, match="logprobs"):
            from_openai(await chunks_of_call(double, CHAT))
        double.turn(omit_logprobs=False, finish_reason="abort")
        assert from_openai(await chunks_of_call(double, CHAT))["status"] == "aborted"


async def test_weights_that_change_during_an_answer_are_two_runs() -> None:
    with engine_double("vllm", next_version="8", version_tokens=2, replies=["abc"]) as double:
        runs = from_openai(await chunks_of_call(double, CHAT)).get("version_runs", [])
        assert [(run.version, run.num_tokens) for run in runs] == [(7, 2), (8, 2)]
