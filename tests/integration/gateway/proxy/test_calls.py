"""Model calls of agents are turns, which are stored before the agent has its answer whole."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from testkit.services.agents import Agent
from testkit.services.engine_doubles import EngineDouble
from testkit.services.engine_model import decode, logprob
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from testkit.waiting import wait_until
from turnstream.batching.merge.merging import turn_prompts
from turnstream.types import SealedTrajectory, TrajectoryKey, VersionRun
from turnstream_server.gateway.config import EngineAddress

KEY = TrajectoryKey("g", 0)
RETRY = {"x-stainless-retry-count": "1"}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def texts(reader: RunReader) -> list[tuple[str, str]]:
    """Return prompt and response of each stored turn, with special tokens."""
    turns = reader.turns(KEY)
    return [
        (decode(prompt.tolist(), with_special=True), decode(turn.response_ids.tolist()))
        for prompt, turn in zip(turn_prompts(turns), turns, strict=True)
    ]


def seals(reader: RunReader) -> list[SealedTrajectory]:
    return [event for event in reader.events() if isinstance(event, SealedTrajectory)]


def test_chat_completion_is_a_turn_with_the_tokens_of_the_engine(agent: Agent, reader: RunReader):
    answer = agent.ask("hi")

    (turn,) = reader.turns(KEY)
    text = answer.choices[0].message.content
    assert texts(reader) == [("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", text)]
    ids = turn.response_ids.tolist()
    assert turn.logprobs is not None
    np.testing.assert_allclose(turn.logprobs, [logprob(each) for each in ids])
    assert turn.version_runs == (VersionRun(7, len(ids)),)
    assert answer.choices[0].logprobs is None
    assert not {"prompt_token_ids", "token_ids"} & {*answer.model_dump()}


def test_completion_is_a_turn(agent: Agent, reader: RunReader):
    answer = agent.client().completions.create(model="policy", prompt="once")

    assert texts(reader) == [("once", answer.choices[0].text)]


def test_conversation_with_tools_is_one_row(agent: Agent, engine: EngineDouble, reader: RunReader):
    engine.turn(calls_tools=True)
    messages: list[Any] = [{"role": "user", "content": "sunny?"}]
    for _ in range(3):
        answer = agent.client().chat.completions.create(
            model="policy", messages=messages, tools=[WEATHER], max_tokens=200
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "yes"}
            for call in message.tool_calls or ()
        ]
    assert agent.send("POST", "session/end", json={"reward": 1.0}).json() == {"state": "sealed"}

    (sealed,) = seals(reader)
    shapes = sealed.turns
    assert [shape.parent_turn for shape in shapes] == [-1, 0, 1]
    lengths = [shape.num_tokens for shape in shapes]
    assert [shape.shared_tokens for shape in shapes[1:]] == lengths[:-1]
    assert sealed.reward == 1.0


def test_stream_passes_tokens_on_and_holds_its_end_until_the_turn_is_stored(
    agent: Agent, engine: EngineDouble, reader: RunReader
):
    engine.turn(delay_s=0.02)
    stream = agent.client().chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    seen: list[tuple[str, int]] = []
    for chunk in stream:
        reason = chunk.choices[0].finish_reason or ""
        seen.append((reason, len(reader.turns(KEY))))

    assert [reason for reason, _ in seen][-1] == "stop"
    assert [num for reason, num in seen if reason] == [1]
    assert seen[0][1] == 0
    assert len(seen) > 5


def test_choices_are_siblings_of_which_one_is_continued(agent: Agent, reader: RunReader):
    answer = agent.ask("hi", n=3)
    chosen = answer.choices[1].message
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": chosen.content},
        {"role": "user", "content": "more"},
    ]
    agent.client().chat.completions.create(model="policy", messages=messages)
    agent.send("POST", "session/end", json={"reward": 1.0}).raise_for_status()

    (sealed,) = seals(reader)
    assert [shape.is_left_out for shape in sealed.turns] == [True, False, True, False]
    assert sealed.turns[3].parent_turn == 1


@pytest.mark.parametrize("is_running", [True, False])
def test_marked_retry_gets_the_answer_of_the_call_before(
    is_running: bool, agent: Agent, engine: EngineDouble, reader: RunReader
):
    engine.turn(delay_s=0.1)
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}

    def send(**options: Any) -> Any:
        auth = {"Authorization": f"Bearer {agent.key}"} | options
        url = f"{agent.base_url}/chat/completions"
        return httpx2.post(url, json=body, headers=auth, timeout=60).json()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(send)
        wait_until(lambda: len(engine.bodies) == 1, describe="the call")
        if not is_running:
            first.result()
        again = threads.submit(send, **RETRY)
        assert first.result() == again.result()
    third = send()

    assert len(reader.turns(KEY)) == 2
    assert third["id"] != first.result()["id"]


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"usage_offset": 1}, "usage.completion_tokens"),
        ({"omit_logprobs": True}, "logprobs"),
        ({"finish_reason": "abort"}, "'abort'"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_answer_that_is_not_whole_is_an_error_and_no_turn(
    knobs: dict[str, Any],
    reason: str,
    is_stream: bool,
    agent: Agent,
    engine: EngineDouble,
    reader: RunReader,
):
    engine.turn(**knobs)

    with pytest.raises(openai.APIError, match=reason):
        _ = [*agent.ask("hi", stream=is_stream)]

    assert reader.turns(KEY) == []
    facts = agent.send("GET", "session").json()
    assert (facts["state"], facts["num_turns"], facts["num_incomplete"]) == ("open", 0, 1)
    assert reason in facts["last_incomplete"]


def test_cut_stream_ends_with_an_error(agent: Agent, engine: EngineDouble, reader: RunReader):
    engine.turn(cut_done=True)

    stream = agent.client(max_retries=0).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    reasons: list[Any] = []
    with pytest.raises(openai.APIError, match="nothing is stored"):
        reasons.extend(chunk.choices[0].finish_reason for chunk in stream)

    assert {*reasons} == {None}
    assert reader.turns(KEY) == []


def test_call_for_another_model_is_passed_on(
    open_session: Callable[..., Agent], engine: EngineDouble, reader: RunReader
):
    agent = open_session(policy="demo")

    answer = agent.ask("judge this")

    assert answer.choices[0].message.content
    assert reader.ledger() == {}
    assert "return_token_ids" not in engine.bodies[-1]


def test_calls_above_the_limits_of_the_key_are_refused(open_session: Callable[..., Agent]):
    agent = open_session(max_calls=1)
    agent.ask("one")

    with pytest.raises(openai.ConflictError, match="allows 1: make it with a larger max_calls"):
        agent.ask("two")


def test_call_after_the_end_is_refused(agent: Agent):
    agent.ask("one")
    assert agent.send("POST", "session/end", json={"reward": 0.5}).status_code == 200
    again = agent.send("POST", "session/end", json={"reward": 0.5})
    other = agent.send("POST", "session/end", json={"reward": 0.7})

    with pytest.raises(openai.ConflictError, match="already sealed"):
        agent.ask("two")
    assert (again.status_code, other.status_code) == (200, 409)


def test_session_that_is_abandoned_trains_nothing(agent: Agent, reader: RunReader):
    agent.ask("one")

    end = agent.send("POST", "session/end", json={"abandon": "no reward"})

    assert end.json() == {"state": "abandoned"}
    assert reader.states() == {"g/0/0": "abandoned"}


def test_agent_that_has_left_gets_its_answer_by_a_retry(
    agent: Agent, engine: EngineDouble, reader: RunReader
):
    engine.turn(delay_s=0.05)
    with pytest.raises(openai.APITimeoutError):
        agent.client(timeout=0.3, max_retries=0).chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "hi"}]
        )
    wait_until(lambda: engine.num_running == 0, describe="the whole answer")
    assert len(engine.bodies) == 1
    assert reader.turns(KEY) == []

    found = agent.ask("hi", extra_headers=RETRY)

    assert texts(reader)[0][1] == found.choices[0].message.content
    assert len(engine.bodies) == 1


def test_answers_above_the_memory_of_the_process_are_dropped(
    agent: Agent, engine: EngineDouble, monkeypatch: pytest.MonkeyPatch
):
    agent.ask("first")
    num_bytes = 600  # above one answer, and below two
    monkeypatch.setattr("turnstream_server.gateway.proxy.recorder.MAX_KEPT_TOTAL_BYTES", num_bytes)
    agent.ask("second")

    agent.ask("second", extra_headers=RETRY)
    num_before = len(engine.bodies)
    agent.ask("first", extra_headers=RETRY)

    assert (num_before, len(engine.bodies)) == (2, 3)


def test_gateways_take_turns_at_one_session(
    agent: Agent, new_gateway: Callable[..., GatewayThread], engine: EngineDouble, reader: RunReader
):
    other = new_gateway(engines=(EngineAddress.parse(engine.address),))
    agents = [agent, agent._replace(base_url=f"{other.base_url}/openai/v1")]
    for number in range(4):
        agents[number % 2].ask(f"{number}")
    with ThreadPoolExecutor(8) as threads:
        _ = [*threads.map(lambda number: agents[number % 2].ask(f"at once {number}"), range(8))]
    agents[1].send("POST", "session/end", json={"reward": 1.0}).raise_for_status()

    prompts = [prompt for prompt, _ in texts(reader)]
    assert [f"{n}<" in prompt for n, prompt in enumerate(prompts[:4])] == [True] * 4
    assert len({*prompts}) == 12
    assert len(seals(reader)) == 1


def test_retry_at_another_gateway_supersedes_the_call_before(
    agent: Agent, new_gateway: Callable[..., GatewayThread], engine: EngineDouble, reader: RunReader
):
    agent.ask("hi")
    other = new_gateway(engines=(EngineAddress.parse(engine.address),))
    again = agent._replace(base_url=f"{other.base_url}/openai/v1")
    again.ask("hi", extra_headers=RETRY)
    again.send("POST", "session/end", json={"reward": 1.0}).raise_for_status()

    (sealed,) = seals(reader)
    assert [shape.is_left_out for shape in sealed.turns] == [True, False]


def test_path_names_a_session(gateway: GatewayThread, run: str, reader: RunReader):
    base = f"{gateway.base_url}/t/{run}/g/0/v1"
    client = openai.OpenAI(base_url=base, api_key="tml-agents", max_retries=0)
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.ConflictError, match="g/0/0 is not open"):
        client.chat.completions.create(model="policy", messages=messages)

    group = {"items": [{"group_id": "g", "num_samples": 1}]}
    httpx2.post(f"{gateway.base_url}/v1/runs/{run}/groups", json=group).raise_for_status()
    client.chat.completions.create(model="policy", messages=messages)

    assert len(reader.turns(KEY)) == 1
