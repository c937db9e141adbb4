"""The cache of open trajectories: its bounds, stale entries, and requests at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from testkit.requests.ingest import IngestClient, results_of, trajectory_items, turn_fields
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from testkit.turns import group, trajectory, turn
from testkit.waiting import wait_until, wait_until_async
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.types import GroupOpened, TrajectoryKey
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.rest.ingest import publishers
from turnstream_server.gateway.rest.ingest.delivery import Delivery
from turnstream_server.gateway.rest.ingest.publishers import Publishers
from turnstream_server.gateway.rest.ingest.writes import Opening
from turnstream_server.keys.store import create_key

_FIRST, _SECOND = turn("ab", "CD"), turn("abcde", "F")


@pytest.mark.parametrize("bound", ["MAX_TRAJECTORIES", "MAX_TOKEN_BYTES", "MAX_PUBLISHERS"])
def test_dropped_trajectories_are_adopted_again(
    gateway: GatewayThread,
    ingest: IngestClient,
    reader: RunReader,
    monkeypatch: pytest.MonkeyPatch,
    bound: str,
) -> None:
    monkeypatch.setattr(publishers, bound, 1)
    with IngestClient(gateway, ingest.run, writer="other") as other:
        clients = {"a": ingest, "b": other, "c": ingest}

        results = [each.turn(0, _FIRST, group_id=name) for name, each in clients.items()]
        results += [
            each.turn(1, _SECOND, group_id=name, seal={"reward": 1.0})
            for name, each in clients.items()
        ]

    assert {each["status"] for each in results} == {201}
    assert reader.ledger() == {f"{name}/0/0": "sealed:1" for name in clients}


def test_only_own_trajectories_make_room_and_a_ping_renews_all(
    client: redis.Redis,
    new_run: Callable[..., str],
    new_gateway: Callable[..., GatewayThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishers, "MAX_TRAJECTORIES", 3)
    monkeypatch.setattr(publishers, "MAX_PUBLISHERS", 3)
    run, gateway = new_run(client, lease_s=3), new_gateway(requires_key=True)
    leases = keys.run_keys(run).leases

    def writer(key: str, name: str) -> IngestClient:
        ingest = stack.enter_context(IngestClient(gateway, run, writer=name))
        ingest.http.headers["X-API-Key"] = secrets[key]
        return ingest

    with contextlib.ExitStack() as stack:
        secrets = {each: create_key(client, f"{run} {each}", roles=["produce"]) for each in "ab"}
        pinged, silent, third = (writer("a", name) for name in ("pinged", "silent", "third"))
        for name in "12":
            pinged.turn(0, _FIRST, group_id=f"pinged {name}")
        silent.turn(0, _FIRST, group_id="silent")
        pinged.results("turns")
        third.turn(0, _FIRST, group_id="third")
        others = [writer("b", f"other {number}") for number in range(4)]
        for number in range(8):
            others[number % 4].turn(0, _FIRST, group_id=f"other {number}")

        def renewed() -> dict[str, bool]:
            pinged.results("turns")
            third.results("turns")
            now = {name: client.zscore(leases, name) for name in before}
            return {name: before[name] != at for name, at in now.items()}

        names = ["pinged%201/0/0", "pinged%202/0/0", "third/0/0", "silent/0/0"]
        before = {name: client.zscore(leases, name) for name in names}
        wait_until(lambda: all(list(renewed().values())[:3]), describe="the renewed leases")
        assert not renewed()["silent/0/0"]


@pytest.mark.parametrize("is_shared", [True, False])
async def test_kept_trajectory_is_renewed_without_requests(
    server: EmbeddedServer,
    client: redis.Redis,
    new_run: Callable[..., str],
    is_shared: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = new_run(client, lease_s=1)
    leases = keys.run_keys(run).leases
    kept, silent = members = [TrajectoryKey("g", sample) for sample in range(2)]
    opening = Opening(GroupOpened(group_id="g", prompt_uid="", num_samples=2), members)
    async with connect_async(server.url) as store:
        every = Publishers(server.url, store)
        async with every.borrow(run, "w", members, owner="o", is_shared=is_shared) as (used, slots):
            await Delivery(used, store, slots).open_members([opening])
            slots[kept].kept_until_s = math.inf

        await wait_until_async(lambda: silent not in used.slots, describe="the silent one's end")
        before = client.zscore(leases, kept.trajectory_id)
        await wait_until_async(
            lambda: client.zscore(leases, kept.trajectory_id) != before, describe="a renewal"
        )
        assert list(used.slots) == [kept]
        used.slots[kept].kept_until_s = asyncio.get_running_loop().time()
        await wait_until_async(
            lambda: "w leaves 1 trajectories open" in caplog.text, describe="the end of the writer"
        )
        await every.close()


def test_fenced_writer_adopts_and_tries_once_more(
    server: EmbeddedServer,
    client: redis.Redis,
    ingest: IngestClient,
    reader: RunReader,
    new_gateway: Callable[..., GatewayThread],
) -> None:
    ingest.turn(0, _FIRST)
    leases = keys.run_keys(ingest.run).leases
    opened = client.zscore(leases, "g/0/0")
    # The next renewal is 20 s after the first: it does not notice that the lease is lost.
    wait_until(lambda: client.zscore(leases, "g/0/0") != opened, describe="the first renewal")

    client.zadd(leases, {"g/0/0": 1})
    with Publisher(server.url, ingest.run, writer="sdk") as publisher:
        publisher.adopt("g", 0)  # epoch 2
    client.zadd(leases, {"g/0/0": 1})
    with IngestClient(new_gateway(), ingest.run) as other:
        other.results("turns", {"group_id": "g", "sample": 0})  # epoch 3
        result = ingest.turn(1, _SECOND)  # its writer has epoch 1

    assert result["status"] == 201
    assert reader.ledger() == {"g/0/0": "open:3:test"}
    assert len(reader.turns(TrajectoryKey("g", 0))) == 2


def test_same_request_at_the_same_time_is_stored_once(
    ingest: IngestClient, reader: RunReader, new_gateway: Callable[..., GatewayThread]
) -> None:
    item = {"group_id": "g", "sample": 0, "num_samples": 1, "turn": 0, **turn_fields(_FIRST)}
    whole = trajectory_items(group("whole", *[trajectory(sample=n) for n in range(4)]))
    with IngestClient(new_gateway(), ingest.run) as other, ThreadPoolExecutor(8) as threads:
        clients = [ingest, other] * 6
        # The first request builds the routes, with filters of warnings that all threads share.
        assert [each.http.get("nothing").status_code for each in (ingest, other)] == [404] * 2

        turns = [threads.submit(each.post, "turns", item) for each in clients]
        wholes = [threads.submit(each.post, "trajectories", *whole) for each in clients]
        results = [results_of(each.result()) for each in (*turns, *wholes)]

    assert {each["status"] for answer in results for each in answer} == {201}
    assert len(reader.turns(TrajectoryKey("g", 0))) == 1
    assert reader.counts() == {"accepted": 5, "open": 1, "sealed": 4}
