"""Requests to `POST /v1/store`: bodies, replies, and problem documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import redis

from testkit.gateway_thread import GatewayThread
from testkit.store_commands import key_with, replies_of
from turnstream.store.client import keys
from turnstream.store.client.http_address import COMMANDS
from turnstream.store.client.scripts import pack
from turnstream_server.gateway.rest.commands.plan import plan_commands
from turnstream_server.gateway.rest.commands.scripts import SCRIPTS
from turnstream_server.keys.records import LOCAL_KEY

pytestmark = pytest.mark.redis


@pytest.fixture
def post(gateway: GatewayThread) -> Iterator[Callable[[bytes], httpx2.Response]]:
    """`post(body)` sends the bytes of commands."""
    with httpx2.Client(base_url=gateway.base_url, headers={"Content-Type": COMMANDS}) as http:
        yield lambda body: http.post("/v1/store", content=body)


def test_refused_command_of_a_body_leaves_the_others(post: Any) -> None:
    found = replies_of(post(pack([("PING",), ("FLUSHALL",), ("PING",)])))

    assert [found[0], found[2]] == [b"PONG", b"PONG"]
    assert found[1].startswith("NOPERM the command b'FLUSHALL'")


def test_transaction_with_a_refused_command_is_not_sent(
    post: Any, client: redis.Redis, new_run: Callable[..., str]
) -> None:
    run = new_run(client)
    pause = next(each.script for each in SCRIPTS if each.script.name == "set_paused")
    names = keys.run_keys(run)
    call = pause((names.frontier, names.wake), 1, "").words
    load = ("SCRIPT", "LOAD", pause.source)

    refused = replies_of(post(pack([load, ("MULTI",), call, ("KEYS", "*"), ("EXEC",)])))
    is_paused = client.hexists(names.frontier, "paused")
    accepted = replies_of(post(pack([("MULTI",), call, ("INFO", "server"), ("EXEC",), ("PING",)])))

    assert refused[1:3] == [b"OK", b"QUEUED"]
    assert refused[3].startswith("NOPERM ")
    assert refused[4].startswith("EXECABORT ")
    assert not is_paused
    assert accepted[3][0] == 1
    assert accepted[3][1].startswith(b"run_id:")
    assert client.hexists(names.frontier, "paused")


def test_facts_of_the_store_are_not_shown(post: Any) -> None:
    server, memory = replies_of(post(pack([("INFO", "server"), ("INFO", "memory")])))

    assert [line.partition(b":")[0] for line in server.splitlines()] == [b"run_id"]
    assert [line.partition(b":")[0] for line in memory.splitlines()] == [
        *(b"used_memory", b"maxmemory")
    ]


def test_names_of_other_runs_are_not_shown(sent: Any) -> None:
    (words,) = {tuple(each) for each in sent["SMEMBERS runs"]}

    (step,) = plan_commands(pack([words]), key_with("read", runs=["a/b", "c"])).steps
    (found,) = step.answers(iter([[b"a%2Fb", b"a%2Fb~2", b"b", b"c~3", b"a"]]))

    assert found == [b"a%2Fb", b"a%2Fb~2", b"c~3"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"PING\r\n",
        b"*1\r\n$4\r\nPING",
        b"*1\r\n$4\r\nPINGxx",
        b"*1000000000\r\n$4\r\nPING\r\n",
        b"*1\r\n$1000000000\r\nPING\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"*1\r\n$-1\r\n",
        b"*1\r\n:4\r\n",
        b"*01\r\n$4\r\nPING\r\nx",
        b"*2\r\n$4\r\nPING\r\n",
        "*1\r\n$٤\r\nPING\r\n".encode(),
        b"*" + b"1" * 1000,
        b"*1\r\n$5\r\nMULTI\r\n",
        b"*1\r\n$4\r\nEXEC\r\n",
        b"*1\r\n$5\r\nMULTI\r\n*1\r\n$5\r\nMULTI\r\n*1\r\n$4\r\nEXEC\r\n",
    ],
)
def test_broken_body_is_a_problem_document(post: Any, body: bytes) -> None:
    answer = post(body)

    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["title"] == "The body cannot be read"


def test_large_body_is_refused(new_gateway: Callable[..., GatewayThread]) -> None:
    gateway = new_gateway(max_body_bytes=1_000)

    answer = httpx2.post(
        f"{gateway.base_url}/v1/store", content=bytes(2_000), headers={"Content-Type": COMMANDS}
    )

    assert answer.status_code == 413


def test_blocking_read_has_a_request_of_its_own(
    post: Any, client: redis.Redis, new_run: Callable[..., str]
) -> None:
    wake = keys.run_keys(new_run(client)).wake
    read = ("XREAD", "BLOCK", 100_000, "STREAMS", wake, "0-0")

    found = replies_of(post(pack([("PING",), read])))
    plan = plan_commands(pack([read]), LOCAL_KEY)

    assert found[1].startswith("NOPERM a blocking read")
    assert plan.block_s == 10.0
    assert plan.sent[0][3:5] == [b"BLOCK", b"10000"]
