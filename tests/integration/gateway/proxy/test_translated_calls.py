"""Calls of the APIs of Anthropic and of responses are the same turns as chat completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import redis

from testkit.services.agents import Agent
from testkit.services.engine_doubles import EngineDouble, engine_double
from testkit.services.engine_model import decode
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from testkit.waiting import wait_until
from turnstream.batching.merge.merging import turn_prompts
from turnstream.types import SealedTrajectory, TrajectoryKey
from turnstream_server.gateway.config import EngineAddress

KEY = TrajectoryKey("g", 0)
RETRY = {"x-stainless-retry-count": "1"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
USER: list[Any] = [{"role": "user", "content": "hi"}]


def anthropic_url(agent: Agent) -> str:
    return agent.base_url.replace("/openai/v1", "/anthropic")


def client_of(agent: Agent, **options: Any) -> anthropic.Anthropic:
    """Return the client that an agent makes out of its environment."""
    url = anthropic_url(agent)
    return anthropic.Anthropic(base_url=url, api_key=agent.key, max_retries=0, **options)


class Messages:
    """An agent on the package `anthropic`."""

    errors = anthropic
    last_event = "message_stop"

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def ask(
        self, items: list[Any], *, is_stream: bool = False, timeout: float = 60.0, **fields: Any
    ) -> Any:
        """Return the message for these messages."""
        asked: dict[str, Any] = {"model": "policy", "max_tokens": 500, "messages": items, **fields}
        with client_of(self._agent, timeout=timeout) as client:
            if not is_stream:
                return client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                return stream.get_final_message()

    def events(self, items: list[Any]) -> Iterator[Any]:
        """Yield the events of a stream."""
        asked: dict[str, Any] = {"model": "policy", "max_tokens": 500, "messages": items}
        with client_of(self._agent) as client:
            yield from client.messages.create(**asked, stream=True)

    @staticmethod
    def text(answer: Any) -> str:
        """Return the text of an answer."""
        return "".join(each.text for each in answer.content if each.type == "text")

    @staticmethod
    def tool() -> dict[str, Any]:
        """Return a tool."""
        return {"name": "weather", "input_schema": SCHEMA}

    @staticmethod
    def continued(answer: Any) -> list[Any]:
        """Return an answer, and the results of its calls, as input."""
        blocks = [each.model_dump(exclude_none=True) for each in answer.content]
        results = [
            {"type": "tool_result", "tool_use_id": each.id, "content": "yes"}
            for each in answer.content
            if each.type == "tool_use"
        ]
        assert answer.stop_reason == "tool_use"
        return [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


class Responses:
    """An agent on the package `openai`, with responses."""

    errors = openai
    last_event = "response.completed"

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def ask(
        self, items: list[Any], *, is_stream: bool = False, timeout: float = 60.0, **fields: Any
    ) -> Any:
        """Return the response for these items."""
        asked: dict[str, Any] = {"model": "policy", "input": items, "store": False, **fields}
        with self._agent.client(max_retries=0, timeout=timeout) as client:
            if not is_stream:
                return client.responses.create(**asked)
            with client.responses.stream(**asked) as stream:
                return stream.get_final_response()

    def events(self, items: list[Any]) -> Iterator[Any]:
        """Yield the events of a stream."""
        with self._agent.client(max_retries=0) as client:
            yield from client.responses.create(model="policy", input=items, stream=True)

    @staticmethod
    def text(answer: Any) -> str:
        """Return the text of an answer."""
        return answer.output_text

    @staticmethod
    def tool() -> dict[str, Any]:
        """Return a tool."""
        return {"type": "function", "name": "weather", "parameters": SCHEMA}

    @staticmethod
    def continued(answer: Any) -> list[Any]:
        """Return an answer, and the results of its calls, as input."""
        items = [each.model_dump(exclude_none=True) for each in answer.output]
        results = [
            {"type": "function_call_output", "call_id": each.call_id, "output": "yes"}
            for each in answer.output
            if each.type == "function_call"
        ]
        return [*items, *results]


@pytest.fixture(params=[Messages, Responses])
def api(request: pytest.FixtureRequest, agent: Agent) -> Any:
    """An agent of sample 0 of group g, on each of the APIs."""
    return request.param(agent)


@pytest.mark.parametrize("is_stream", [False, True])
def test_answer_is_a_turn_with_the_tokens_of_the_engine(
    is_stream: bool, api: Any, reader: RunReader
):
    answer = api.ask(USER, is_stream=is_stream)

    (turn,) = reader.turns(KEY)
    assert api.text(answer) == decode(turn.response_ids.tolist())
    assert answer.usage.output_tokens == len(turn.response_ids)
    (prompt,) = turn_prompts([turn])
    assert decode(prompt.tolist(), with_special=True) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer.usage.input_tokens == len(prompt)


def test_conversation_with_tools_and_reasoning_is_one_row(
    api: Any, agent: Agent, engine: EngineDouble, reader: RunReader
):
    engine.turn(calls_tools=True, thinks=True)
    items = [*USER]
    for is_stream in (False, True, False):
        answer = api.ask(items, is_stream=is_stream, tools=[api.tool()])
        items += api.continued(answer)
    agent.send("POST", "session/end", json={"reward": 1.0}).raise_for_status()

    (sealed,) = [event for event in reader.events() if isinstance(event, SealedTrajectory)]
    shapes = sealed.turns
    assert [shape.parent_turn for shape in shapes] == [-1, 0, 1]
    lengths = [shape.num_tokens for shape in shapes]
    assert [shape.shared_tokens for shape in shapes[1:]] == lengths[:-1]


def test_stream_ends_once_its_turn_is_stored(api: Any, engine: EngineDouble, reader: RunReader):
    engine.turn(delay_s=0.02)

    seen = [(event.type, len(reader.turns(KEY))) for event in api.events(USER)]

    deltas = [num for kind, num in seen if kind.endswith("delta") and kind != "message_delta"]
    assert deltas[0] == 0
    assert len(deltas) > 3
    assert seen[-1] == (api.last_event, 1)


def test_answer_of_sglang_is_streamed_too(
    agent: Agent, new_gateway: Callable[..., GatewayThread], reader: RunReader
):
    with engine_double("sglang", thinks=True) as engine:
        gateway = new_gateway(engines=(EngineAddress.parse(engine.address),))
        other = agent._replace(base_url=f"{gateway.base_url}/openai/v1")
        for api in (Messages(other), Responses(other)):
            assert api.text(api.ask(USER, is_stream=True))

    assert len(reader.turns(KEY)) == 2


def test_marked_retry_gets_the_answer_of_the_call_before(
    api: Any, engine: EngineDouble, reader: RunReader
):
    engine.turn(delay_s=0.1)
    with pytest.raises(api.errors.APITimeoutError):
        api.ask(USER, timeout=0.3)
    wait_until(lambda: engine.num_running == 0, describe="the whole answer")
    assert reader.turns(KEY) == []

    found = api.ask(USER, extra_headers=RETRY)
    again = api.ask(USER, extra_headers=RETRY)

    assert found.id == again.id
    assert len(engine.bodies) == len(reader.turns(KEY)) == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_incomplete_call_is_an_error_and_no_turn(
    is_stream: bool, api: Any, engine: EngineDouble, reader: RunReader
):
    engine.turn(usage_offset=1)
    seen: list[str] = []

    with pytest.raises(api.errors.APIError, match="nothing is stored: usage"):
        seen.extend(each.type for each in (api.events(USER) if is_stream else [api.ask(USER)]))

    assert len(seen) > 2 or not is_stream
    assert api.last_event not in seen
    assert reader.turns(KEY) == []


def test_equal_bodies_of_two_apis_are_two_calls(agent: Agent, reader: RunReader):
    body = {"model": "policy", "messages": USER, "max_tokens": 9}
    headers = {"Authorization": f"Bearer {agent.key}", **RETRY}
    for url in (f"{agent.base_url}/chat/completions", f"{anthropic_url(agent)}/v1/messages"):
        httpx2.post(url, json=body, headers=headers).raise_for_status()

    assert len(reader.turns(KEY)) == 2


def test_refusals_have_the_shape_of_the_api(
    client: redis.Redis,
    agent: Agent,
    open_session: Callable[..., Agent],
    new_run: Callable[..., str],
    engine: EngineDouble,
):
    small = new_run(client, batch_groups=1, max_staleness=0, max_planned_ahead=0)
    first, second = [open_session(small, group_id=name) for name in ("a", "b")]
    Messages(agent).ask(USER)
    agent.send("POST", "session/end", json={"reward": 0.5}).raise_for_status()
    Messages(first).ask(USER)
    sealed, too_many, unknown = [
        caught(kind, each)
        for kind, each in (
            (anthropic.ConflictError, agent),
            (anthropic.RateLimitError, second),
            (anthropic.AuthenticationError, agent._replace(key="tms-none")),
        )
    ]
    engine.turn(fail=[400])
    refused = caught(anthropic.BadRequestError, first)

    assert [each.body["error"]["type"] for each in (sealed, too_many, unknown, refused)] == [
        "invalid_request_error",
        "rate_limit_error",
        "authentication_error",
        "invalid_request_error",
    ]
    assert sealed.response.headers["x-should-retry"] == "false"
    assert int(too_many.response.headers["retry-after"]) >= 1
    assert refused.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "injected 400"},
    }
    with pytest.raises(openai.ConflictError, match="already sealed"):
        Responses(agent).ask(USER)
    with pytest.raises(openai.UnprocessableEntityError, match="previous_response_id"):
        Responses(first).ask(USER, previous_response_id="resp_1")


def caught(kind: type[anthropic.APIStatusError], agent: Agent) -> Any:
    """Return the error of a call."""
    with pytest.raises(kind) as error:
        Messages(agent).ask(USER)
    assert error.value.body["type"] == "error"  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]
    return error.value


def test_call_for_another_model_is_passed_on(
    open_session: Callable[..., Agent], engine: EngineDouble, reader: RunReader
):
    agent = open_session(policy="demo")

    for kind in (Messages, Responses):
        for is_stream in (False, True):
            api = kind(agent)
            answer = api.ask(USER, is_stream=is_stream)
            assert api.text(answer)
            assert answer.usage.output_tokens
    assert reader.ledger() == {}
    assert "return_token_ids" not in engine.bodies[-1]


def test_client_of_anthropic_lists_models_but_counts_no_tokens(agent: Agent):
    with client_of(agent) as client:
        assert [model.id for model in client.models.list()] == ["policy"]
        with pytest.raises(anthropic.NotFoundError, match="tokens are not counted before a call"):
            client.messages.count_tokens(model="policy", messages=USER)
