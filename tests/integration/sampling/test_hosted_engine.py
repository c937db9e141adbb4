"""Hosted models as engines of the capture proxy, sampled in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import pytest
import redis

from testkit.training.sampling import ModelFolders, SamplingClient
from testkit.waiting import wait_until_async
from turnstream.responses import from_openai
from turnstream.store.client.connection import connect_async
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.config import EngineAddress, GatewayOptions
from turnstream_server.gateway.polls import Polls
from turnstream_server.gateway.proxy import hosted
from turnstream_server.gateway.proxy.engines import EngineRefusalError, Engines
from turnstream_server.gateway.proxy.hosted import engines_of
from turnstream_server.gateway.proxy.requests import Route
from turnstream_server.gateway.state import Gateway
from turnstream_server.operations.checkpoints import (
    CheckpointPath,
    SavedCheckpoint,
    folder_of,
    write_checkpoint,
)
from turnstream_server.operations.contents import CreateModel
from turnstream_server.operations.keys import ALIVE
from turnstream_server.operations.models import (
    BaseModel,
    ModelRecord,
    create_model,
    register_base,
)
from turnstream_server.operations.results import Failure, decode_result
from turnstream_server.sampling.snapshots import Snapshots

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "6 * 7?"}], "max_tokens": 6}
TEXT: dict[str, Any] = {"prompt": "6 * 7?", "max_tokens": 6}
PROMPT = [257, *b"user\n6 * 7?", 258, *b"\n", 257, *b"assistant\n"]
CALLS: list[tuple[Route, dict[str, Any], list[int]]] = [
    ("chat/completions", CHAT, PROMPT),
    ("completions", TEXT, [*b"6 * 7?"]),
]

Looping = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def base(
    models: ModelFolders, client: redis.Redis, sessions: SamplingClient, looping: Looping
) -> Iterator[str]:
    """A base model that a sampler serves, by its name."""
    name = sessions.base_model
    register_base(client, BaseModel(name, 64, 261, str(models.base), 4))
    with (
        Snapshots(models.base, shared=models.shared) as engine,
        looping(client, name, engine),
    ):
        yield name


@contextlib.asynccontextmanager
async def opened(url: str, model: str, **options: Any) -> AsyncIterator[Engines]:
    """Open the engines of a gateway that serves no HTTP."""
    engines = (EngineAddress("hosted", model),)
    async with (
        connect_async(url) as client,
        connect_async(url, num_retries=0) as waiting,
    ):
        polls = Polls(client, waiting)
        given = GatewayOptions(redis_url=url, engines=engines, **options)
        gateway = Gateway(given, client, polls)
        async with polls.listening(), gateway.resources, engines_of(gateway) as opened:
            yield opened


async def answer_of(engines: Engines, route: Route, body: dict[str, Any]) -> Any:
    """Return the response of a call, or the chunks of its stream."""
    async with engines.call(route, body, session="s") as answer:
        if answer.is_stream:
            return [each async for each in answer.chunks()]
        return await answer.whole()


async def test_answers_have_the_logprobs_of_a_forward_pass(
    models: ModelFolders, server: EmbeddedServer, client: redis.Redis, base: str
) -> None:
    path = CheckpointPath(f"{base.replace('/', '-')}:train:0", "sampler_weights", "v7")
    models.write_adapter(folder := str(folder_of(path)), seed=5)
    async with connect_async(server.url) as store:
        record = ModelRecord(path.model_id, base, "o", lora_rank=2)
        await create_model(store, record, CreateModel(path=None, optimizer=False))
    saved = SavedCheckpoint(path, f"{path.model_id}:1", base, 2, True, True, True, 0, None, 1)
    write_checkpoint(client, "o", saved)
    for model, snapshot, version in ((base, None, 0), (str(path), folder, 7)):
        async with opened(server.url, model) as engines:
            assert [each["id"] for each in await engines.models()] == [model]
            for route, body, prompt in CALLS:
                asked = {**body, "model": model, "n": 2, "temperature": 0.5, "seed": 3}
                whole = await answer_of(engines, route, asked)
                chunks = await answer_of(engines, route, {**asked, "stream": True})
                for index in range(2):
                    turn = from_openai(whole, index=index)
                    assert from_openai(chunks, index=index) == turn
                    assert turn["prompt_ids"] == prompt
                    assert [each.version for each in turn.get("version_runs", ())] == [version]
                    ids = [*prompt, *turn["response_ids"]]
                    expected = models.logprobs(snapshot, ids, temperature=0.5)[len(prompt) :]
                    np.testing.assert_allclose(turn["logprobs"], expected, atol=1e-4)


async def test_stops_and_likely_tokens_are_those_of_the_call(
    server: EmbeddedServer, base: str
) -> None:
    async with opened(server.url, base) as engines:
        asked = {**CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 3}
        response = await answer_of(engines, "chat/completions", asked)
        [choice] = response["choices"]
        content = choice["logprobs"]["content"]
        for entry in content:
            assert len(entry["top_logprobs"]) == 3
            assert entry["logprob"] == max(each["logprob"] for each in entry["top_logprobs"])
        ids = choice["token_ids"]
        stopped = await answer_of(
            engines, "chat/completions", {**asked, "stop_token_ids": [ids[2]]}
        )
        end = ids.index(ids[2]) + 1
        assert stopped["choices"][0]["token_ids"] == ids[:end]
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["usage"]["completion_tokens"] == end


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"messages": [{"role": "user", "content": "x" * 80}]}, None),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"model": "judge"}, "model"),
        ({"temperature": -1.0}, "temperature"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_calls_that_cannot_be_sampled_are_refused(
    server: EmbeddedServer, base: str, options: dict[str, Any], field: str | None
) -> None:
    async with opened(server.url, base) as engines:
        with pytest.raises(EngineRefusalError) as caught:
            await answer_of(engines, "chat/completions", {**CHAT, **options})
    assert caught.value.status == (404 if field == "model" else 400)
    assert caught.value.body["error"]["param"] == field


async def test_call_that_ends_cancels_its_sample(
    server: EmbeddedServer, client: redis.Redis, sessions: SamplingClient, models: ModelFolders
) -> None:
    name = sessions.base_model
    register_base(client, BaseModel(name, 64, 261, str(models.base), 4))
    before: Any = client.keys("*proxy-*:results")
    async with opened(server.url, name) as engines:
        task = asyncio.create_task(answer_of(engines, "completions", TEXT))
        await wait_until_async(lambda: asyncio.to_thread(sessions.num_queued))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    found: Any = client.keys("*proxy-*:results")
    [key] = set(found) - set(before)
    [stored] = cast("list[bytes]", client.hvals(key))
    assert decode_result(stored) == Failure("the sample was cancelled", "user")


async def test_sessions_are_replaced_after_many_calls_and_when_they_are_lost(
    server: EmbeddedServer, client: redis.Redis, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "_CALLS_OF_SESSION", 2)

    def sessions() -> set[bytes]:
        found: Any = client.zrange(ALIVE, 0, -1)
        return {each for each in found if each.startswith(b"proxy-")}

    async with opened(server.url, base, session_silence_s=0.2) as engines:
        before = sessions()
        for _ in range(3):
            await answer_of(engines, "completions", TEXT)
        made = sessions() - before
        assert len(made) == 2
        for each in made:
            client.delete(*client.keys(f"*{each.decode()}*"))
        assert from_openai(await answer_of(engines, "completions", TEXT))
