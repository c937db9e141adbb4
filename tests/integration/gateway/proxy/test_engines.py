"""Calls of engine doubles: the choice of an engine, repeats, waits, cut streams and limits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.services.engine_doubles import EngineDouble, engine_double, engine_process
from testkit.waiting import wait_until_async
from turnstream.errors import InvalidConfigError, UnavailableError
from turnstream.responses import from_openai
from turnstream_server.gateway.proxy import engines as engines_module
from turnstream_server.gateway.proxy.engines import (
    CutStreamError,
    EngineAddress,
    EngineRefusalError,
    Engines,
)
from turnstream_server.gateway.proxy.requests import Route, answered, wanted_of

CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "6 * 7?"}]}
TEXT: dict[str, Any] = {"model": "policy", "prompt": "6 * 7?", "max_tokens": 64}
CALLS: list[tuple[Route, dict[str, Any]]] = [("chat/completions", CHAT), ("completions", TEXT)]


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def shared(request: pytest.FixtureRequest) -> Iterator[EngineDouble]:
    with engine_double(request.param) as double:
        yield double


@contextlib.asynccontextmanager
async def opened(*doubles: EngineDouble, **options: Any) -> AsyncIterator[Engines]:
    """Open the engines of these doubles."""
    addresses = [EngineAddress.parse(each.address) for each in doubles]
    async with Engines(addresses, **options) as engines:
        yield engines


async def answer_of(
    engines: Engines, route: Route, body: dict[str, Any], *, session: str = "s"
) -> Any:
    """Return the response of a call, or the chunks of its stream."""
    async with engines.call(route, body, session=session) as answer:
        assert answer.is_stream == bool(body.get("stream"))
        if answer.is_stream:
            return [each async for each in answer.chunks()]
        return await answer.whole()


def session_of(engines: Engines, double: EngineDouble) -> str:
    """Return a session whose first engine is the double."""
    return next(
        name for name in map(str, range(1000)) if str(engines.ordered(name)[0]) == double.address
    )


@pytest.mark.parametrize(("route", "body"), CALLS)
async def test_streams_and_whole_answers_are_the_same_turns(
    shared: EngineDouble, route: Route, body: dict[str, Any]
) -> None:
    async with opened(shared) as engines:
        for options in ({}, {"n": 3}, {"stop": "a"}, {"max_tokens": 3}, {"logprobs": None}):
            asked = {**body, **options, "seed": 7}
            whole = await answer_of(engines, route, asked)
            chunks = await answer_of(engines, route, {**asked, "stream": True})
            for index in range(asked.get("n", 1)):
                turn = from_openai(whole, index=index)
                assert from_openai(chunks, index=index) == turn
                assert turn["response_ids"]
                assert [run.version for run in turn.get("version_runs", ())] == [7]
            assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
            shown = [answered(each, wanted_of({"stream": True})) for each in chunks]
            texts = ["".join(_texts(each)) for each in ([whole], [each for each in shown if each])]
            assert texts[0] == texts[1]


def _texts(parts: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts of the first choice."""
    for part in parts:
        for choice in part["choices"]:
            if choice["index"] == 0:
                yield (
                    choice.get("text")
                    or (choice.get("message") or choice.get("delta") or {}).get("content")
                    or ""
                )


async def test_engines_get_our_headers_and_none_of_the_agent() -> None:
    with engine_double("vllm", api_key="secret") as double:
        async with opened(double, api_key="secret") as engines:
            await answer_of(engines, "completions", TEXT)
            [headers] = double.headers
            assert headers["authorization"] == "Bearer secret"
            assert headers["accept-encoding"] == "identity"
        async with opened(double, api_key="other") as engines:
            with pytest.raises(EngineRefusalError) as caught:
                await answer_of(engines, "completions", TEXT)
            assert caught.value.status == 401


async def test_refusals_of_an_engine_have_its_body(shared: EngineDouble) -> None:
    async with opened(shared) as engines:
        for stream in (False, True):
            body = {**CHAT, "model": "judge", "stream": stream}
            with pytest.raises(EngineRefusalError, match="`judge` does not exist") as caught:
                await answer_of(engines, "chat/completions", body)
            assert caught.value.status == 404
            assert caught.value.body.get("error", caught.value.body)["code"] == 404
        num_calls = len(shared.bodies)
        with pytest.raises(InvalidConfigError) as refused:
            await answer_of(engines, "completions", {**TEXT, "echo": True})
        assert refused.value.field == "echo"
        assert len(shared.bodies) == num_calls


async def test_calls_that_are_not_captured_pass_unchanged(shared: EngineDouble) -> None:
    async with opened(shared) as engines:
        body = {**TEXT, "echo": False, "user": "judge"}
        async with engines.call("completions", body, session="s", is_captured=False) as answer:
            await answer.whole()
    assert shared.bodies[-1] == body


def test_sessions_stay_with_their_engine_when_others_change() -> None:
    addresses = [EngineAddress("vllm", f"http://10.0.0.{at}:8000") for at in range(8)]
    before, fewer = Engines(addresses), Engines(addresses[:-1])
    names = [f"demo/g{at}/0" for at in range(800)]
    first = {name: before.ordered(name)[0] for name in names}
    assert min(Counter(first.values()).values()) > 60
    for name in names:
        assert sorted(before.ordered(name)) == addresses
        if first[name] != addresses[-1]:
            assert fewer.ordered(name)[0] == first[name]


@pytest.mark.parametrize("status", [500, 503])
async def test_another_engine_takes_a_call_that_fails(status: int) -> None:
    with engine_double("vllm") as one, engine_double("sglang") as two:
        async with opened(one, two) as engines:
            session = session_of(engines, one)
            one.turn(fail=[status])
            body = {**CHAT, "stream": True}
            assert from_openai(await answer_of(engines, "chat/completions", body, session=session))
            assert len(one.bodies) == len(two.bodies) == 1
            assert str(engines.ordered(session)[0]) == two.address  # until it has answered again


async def test_three_tries_are_the_most(shared: EngineDouble) -> None:
    async with opened(shared) as engines:
        shared.turn(fail=[500, 502, 500, 500])
        before = len(shared.bodies)
        with pytest.raises(UnavailableError, match="3 tries at 1 engines have failed"):
            await answer_of(engines, "completions", TEXT)
        assert len(shared.bodies) == before + 3
        assert await answer_of(engines, "completions", TEXT)


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_that_dies_before_its_first_chunk_is_replaced(
    stream: bool, tmp_path: Path
) -> None:
    with engine_process("vllm", tmp_path) as one, engine_double("vllm") as two:
        async with opened(one, two) as engines:
            session = session_of(engines, one)
            one.turn(delay_s=600.0)
            call = answer_of(engines, "completions", {**TEXT, "stream": stream}, session=session)
            task = asyncio.create_task(call)
            await wait_until_async(lambda: asyncio.to_thread(lambda: one.num_running))
            one.kill()
            assert from_openai(await task)
            assert len(two.bodies) == 1


async def test_stream_that_is_cut_after_its_first_chunk_is_an_error(tmp_path: Path) -> None:
    with engine_process("vllm", tmp_path, die_after=3) as one, engine_double("vllm") as two:
        async with opened(one, two) as engines:
            session = session_of(engines, one)
            body = {**TEXT, "stream": True}
            async with engines.call("completions", body, session=session) as answer:
                arriving = answer.chunks()
                chunks = [await anext(arriving) for _ in range(3)]
                with pytest.raises(CutStreamError, match=one.url):
                    await anext(arriving)
            assert chunks[0]["choices"][0]["prompt_token_ids"]
            assert not two.bodies


async def test_stream_without_its_last_event_is_cut() -> None:
    with engine_double("vllm", cut_done=True) as double:
        async with opened(double) as engines:
            with pytest.raises(CutStreamError, match=r"without the event \[DONE\]"):
                await answer_of(engines, "completions", {**TEXT, "stream": True})


async def test_paused_engine_is_awaited() -> None:
    with engine_double("vllm", is_paused=True) as one, engine_double("vllm") as two:
        async with opened(one, two) as engines:
            call = answer_of(engines, "completions", TEXT, session=session_of(engines, one))
            task = asyncio.create_task(call)
            await wait_until_async(lambda: asyncio.to_thread(lambda: len(one.bodies) > 2))
            one.turn(is_paused=False)
            assert await task
            assert not two.bodies


async def test_wait_for_a_paused_engine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "_PAUSED_S", 0.2)
    with engine_double("vllm", is_paused=True) as double:
        async with opened(double) as engines:
            with pytest.raises(UnavailableError, match=r"weight update\., for 0\.2 s"):
                await answer_of(engines, "completions", TEXT)


async def test_silent_engine_is_an_error_without_another_try() -> None:
    with engine_double("vllm", delay_s=30.0) as double:
        async with opened(double, timeout_s=0.3) as engines:
            for stream in (False, True):
                with pytest.raises(UnavailableError, match=r"silent for 0\.3 s.*--engine-timeout"):
                    await answer_of(engines, "completions", {**TEXT, "stream": stream})
            assert len(double.bodies) == 2


async def test_end_of_the_block_ends_the_call_of_the_engine() -> None:
    with engine_double("vllm", delay_s=0.05) as double:
        async with opened(double) as engines:
            body = {**TEXT, "max_tokens": 4000, "stream": True}
            double.turn(replies=["a" * 4000])
            async with engines.call("completions", body, session="s") as answer:
                await anext(answer.chunks())
                assert double.num_running == 1
            await wait_until_async(lambda: asyncio.to_thread(lambda: not double.num_running))


async def test_models_of_all_engines_that_answer_are_listed_once() -> None:
    with engine_double("vllm") as one, engine_double("sglang") as two:
        async with opened(one, two) as engines:
            two.turn(model="judge")
            assert {card["id"] for card in await engines.models()} == {"policy", "judge"}
            two.turn(model="other")
            assert {card["id"] for card in await engines.models()} == {"policy", "judge"}
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            gone = EngineAddress("vllm", f"http://127.0.0.1:{unused.getsockname()[1]}")
            async with Engines([EngineAddress.parse(one.address), gone]) as engines:
                assert [card["id"] for card in await engines.models()] == ["policy"]
            async with Engines([gone]) as engines:
                with pytest.raises(UnavailableError):
                    await engines.models()


async def test_large_answers_are_refused(
    shared: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstream_server.gateway.proxy.answers.MAX_ANSWER_BYTES", 2000)
    async with opened(shared) as engines:
        for stream in (False, True):
            with pytest.raises(Exception, match="more than 0 MiB"):
                await answer_of(engines, "completions", {**TEXT, "n": 20, "stream": stream})


def test_addresses_of_other_forms_are_refused() -> None:
    for text in (
        "http://h:1",
        "vllm=h:1",
        "tgi=http://h:1",
        "vllm=http://h:x",
        "vllm=http://h/?a=1",
    ):
        with pytest.raises(InvalidConfigError, match="is not vllm=URL"):
            EngineAddress.parse(text)
    for text in ("vllm=https://h:1/p", "sglang=http://h", "hosted=tiny"):
        assert str(EngineAddress.parse(text)) == text
