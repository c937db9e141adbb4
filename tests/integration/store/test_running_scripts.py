from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from testkit.runs.run_driver import Drive
from turnstream.errors import (
    ConflictError,
    RejectedError,
    StoreFullError,
    StoreUnavailableError,
)
from turnstream.store.client.connection import connect_async
from turnstream.store.client.scripts import run_command_async, run_commands_async
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis


TURN_0, TURN_1, OTHER_TURN, SEAL = b"first.0000", b"second1111", b"first.9999", b"seal..2222"


def test_a_full_server_takes_no_payload_but_still_takes_seals_and_abandons(
    own_client: redis.Redis, drive: Drive
) -> None:
    run = drive(on=own_client)
    run.do(run.open_group("g/0/0", "g/1/0"))
    run.do_all([run.append(), run.post_sealed("g/9/0", 1, b""), run.abandon("x")])
    memory: Any = own_client.info("memory")
    own_client.config_set("maxmemory", memory["used_memory"] - 100_000)

    answers = run.do_all(
        [
            run.append(TURN_0),
            run.open_group(group="b", num_samples="2+"),
            run.open_group(group="c"),
            run.post_sealed("g/0/0", 1, b"seal"),
            run.abandon("g/1/0"),
        ],
    )

    own_client.config_set("maxmemory", 0)
    full, again, new, *others = answers
    assert type(full) is StoreFullError
    assert again == []
    assert type(new) is RejectedError
    assert "the store is full: it uses" in str(new)
    assert others == [[b"OK"], 1]


def test_scripts_are_loaded_again_after_a_server_lost_them(
    own_client: redis.Redis, drive: Drive
) -> None:
    run = drive(on=own_client)
    run.do(run.open_group("g/0/0"))
    own_client.script_flush()

    # The second call of a trajectory would be refused if the first one were left out.
    answers = run.do_all(
        [run.append(TURN_0), run.append(TURN_1, first=1, lease="1"), run.open_group("g/1/0")],
    )

    assert answers == [1, 1, [1]]
    own_client.script_flush()
    assert run.do(run.open_group("g/1/0")) == [1]


async def test_asyncio_programs_run_scripts_alike(
    own_server: EmbeddedServer, own_client: redis.Redis, drive: Drive
) -> None:
    run = drive(on=own_client)
    async with connect_async(own_server.url) as client:
        await client.script_flush()

        one = await run_command_async(client, run.open_group("g/0/0"))
        many = await run_commands_async(
            client, [run.append(TURN_0), run.append(OTHER_TURN), run.abandon("g/0/0")]
        )

    assert one == [1]
    assert many[::2] == [1, 1]
    assert isinstance(many[1], ConflictError)


def test_a_server_that_is_away_is_an_error_of_ours(
    own_server: EmbeddedServer, own_client: redis.Redis, drive: Drive
) -> None:
    run = drive(on=own_client)
    own_server.kill()

    with pytest.raises(StoreUnavailableError):
        run.do(run.open_group())
    with pytest.raises(StoreUnavailableError):
        run.do_all([run.open_group()])


async def test_calls_of_an_asyncio_client_start_no_task(own_server: EmbeddedServer) -> None:
    loop = asyncio.get_running_loop()
    started: list[Any] = []

    def start(loop: Any, work: Any, **options: Any) -> Any:
        started.append(work)
        return asyncio.Task(work, loop=loop, **options)

    async with connect_async(own_server.url) as client:
        await client.ping()
        loop.set_task_factory(start)
        try:
            assert await client.execute_command("ECHO", "one") == b"one"
            pipeline = client.pipeline(transaction=False)
            pipeline.execute_command("ECHO", "two")
            assert await pipeline.execute() == [b"two"]
        finally:
            loop.set_task_factory(None)

    assert started == []


async def test_asyncio_client_sends_more_than_the_system_takes_at_once(
    own_client: redis.Redis, own_server: EmbeddedServer
) -> None:
    value = bytes(range(256)) * (1 << 16)
    async with connect_async(own_server.url) as client:
        assert await client.execute_command("ECHO", value) == value

    statistics: Any = own_client.info("commandstats")
    assert statistics["cmdstat_echo"]["calls"] == 1


async def test_asyncio_client_keeps_replies_apart_after_cancelled_and_lost_calls(
    own_client: redis.Redis, own_server: EmbeddedServer
) -> None:
    async def echo(word: str) -> bytes:
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("ECHO", word)
        return (await pipeline.execute())[0]

    async with connect_async(own_server.url) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.execute_command("BLPOP", "list", 0.3), 0.1)
        assert await client.execute_command("ECHO", "one") == b"one"
        assert await echo("two") == b"two"
        own_client.execute_command("CLIENT KILL TYPE normal SKIPME yes")
        assert await client.execute_command("ECHO", "three") == b"three"
        own_client.execute_command("CLIENT KILL TYPE normal SKIPME yes")
        assert await echo("four") == b"four"
