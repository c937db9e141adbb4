"""A gateway or a store that is killed in the middle: nothing is lost, nothing is there twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

import turnstream
from testkit import group, ids, wait_until
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from turnstream.errors import StoreUnavailableError, WaitKind
from turnstream.generator.requests import SCRIPTS
from turnstream.store.client.addresses import address_of
from turnstream.store.client.connection import connect
from turnstream.types import GroupOpened, SealedTrajectory
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.keys.store import create_key

pytestmark = pytest.mark.redis


@pytest.fixture
def own_gateway(own_server: EmbeddedServer) -> Iterator[GatewayThread]:
    """A gateway on a store that may be killed; it may be stopped and started."""
    with GatewayThread(own_server.url, shutdown_grace_s=0.1) as gateway:
        yield gateway


@pytest.fixture
def own_run(own_client: redis.Redis, new_run: Callable[..., str]) -> str:
    return new_run(own_client)


def publish_in_thread(
    run: turnstream.Run, may_end: threading.Event
) -> tuple[threading.Thread, list[Any]]:
    """Publish groups one after another; return the thread, and what it has acknowledged."""
    done: list[Any] = []

    def publish() -> None:
        with run.publisher("w", keep_s=1.0) as publisher:
            while not may_end.is_set():
                publisher.publish(group(f"g{len(done)}")).result(60)
                done.append(None)
            publisher.flush_to_disk()
            done.append(publisher.statistics())

    thread = threading.Thread(target=publish)
    thread.start()
    return thread, done


def check_whole(reader: RunReader, num_groups: int) -> None:
    """Check that every group is there, once, with its payload."""
    assert reader.counts() == {"accepted": 2 * num_groups, "sealed": 2 * num_groups}
    events = reader.events()
    assert len(reader.sealed()) == len({*reader.sealed()}) == 2 * num_groups
    assert sum(isinstance(each, GroupOpened) for each in events) == num_groups
    for seal in (each for each in events if isinstance(each, SealedTrajectory)):
        assert reader.spelled(seal.key) == [("ab", "cd")]


@pytest.mark.parametrize("restarted", ["gateway", "store"])
def test_restarted_gateway_or_store_loses_nothing(
    own_gateway: GatewayThread, own_server: EmbeddedServer, own_run: str, restarted: str
) -> None:
    with turnstream.connect(own_gateway.base_url) as service:
        may_end = threading.Event()
        thread, done = publish_in_thread(service.run(own_run), may_end)
        for _ in range(2):
            most = len(done) + 3
            wait_until(lambda most=most: len(done) > most, describe="some groups")
            if restarted == "gateway":
                own_gateway.stop()
                own_gateway.start()
            else:
                own_server.kill()
                own_server.restart()
        most = len(done) + 1
        wait_until(lambda: len(done) > most, describe="the last groups")
        may_end.set()
        thread.join(60)

    with connect(own_server.url) as client:
        check_whole(RunReader(client, own_run), len(done) - 1)
    assert done[-1].num_lost == 0
    assert done[-1].num_retries > 0
    assert (done[-1].num_restarts > 0) == (restarted == "store")


def test_writes_that_a_restarted_store_has_lost_are_sent_again(
    own_gateway: GatewayThread,
    own_server: EmbeddedServer,
    own_run: str,
    past_of: Callable[[EmbeddedServer], Any],
) -> None:
    # The connection to the gateway outlasts the store. Others have connected the gateway and loaded
    # the scripts again, so that no failure shows that the store is another process.
    with (
        turnstream.connect(own_gateway.base_url) as service,
        service.run(own_run).publisher("w", keep_s=60) as publisher,
    ):
        publisher.publish(group("kept")).result()
        past = past_of(own_server)
        publisher.publish(group("lost")).result()
        past.come_back()
        with connect(own_server.url) as client:
            for script in SCRIPTS:
                client.script_load(script.source)
            before = RunReader(client, own_run).counts()
            service.ping()

            publisher.publish(group("next")).result(60)
            publisher.flush()

            check_whole(RunReader(client, own_run), 3)
            assert before == {"accepted": 2, "sealed": 2}
            assert publisher.statistics().num_restarts == 1


def test_gateway_or_store_that_is_away_is_an_unavailable_store(
    own_gateway: GatewayThread, own_server: EmbeddedServer, own_run: str
) -> None:
    with turnstream.connect(own_gateway.base_url) as service:
        run = service.run(own_run)
        publisher = run.publisher("w", timeout_s=2.0)
        open_ = publisher.trajectory("g", 0, num_samples=1)
        open_.append(ids("a"), ids("B")).result()
        own_gateway.stop()

        receipt = open_.append(ids("aBc"), ids("D"))
        with pytest.raises(StoreUnavailableError) as writing:
            receipt.result(30)
        with pytest.raises(StoreUnavailableError) as reading:
            _ = run.config
        with pytest.raises(StoreUnavailableError, match="no gateway answers at 127"):
            turnstream.connect(own_gateway.base_url)
        publisher.close()

        own_gateway.start()
        assert run.config.batch_groups == 100
        own_server.kill()
        with pytest.raises(StoreUnavailableError, match="the store cannot be reached"):
            _ = run.config
        own_server.restart()
        assert run.config.batch_groups == 100

    reasons = {each.kind: each for each in writing.value.reasons}
    address = reasons[WaitKind.STORE_AWAY].facts["address"]
    assert address == address_of(own_gateway.base_url)
    assert reading.value.retry_after_s is not None


def test_large_round_survives_a_gateway_that_cannot_look_up_its_key(
    own_server: EmbeddedServer, own_client: redis.Redis, own_run: str
) -> None:
    # The gateway had answered 413 to any body above 64 KB whose key it did not know, and the
    # publisher failed for good.
    key = create_key(own_client, "large", roles=["produce"])
    with (
        GatewayThread(own_server.url, requires_key=True, shutdown_grace_s=0.1) as gateway,
        turnstream.connect(gateway.base_url, api_key=key) as service,
        service.run(own_run).publisher("w") as publisher,
    ):
        open_ = publisher.trajectory("g", 0, num_samples=1)
        open_.append(ids("a"), ids("B")).result()
        own_server.kill()
        gateway.stop()
        gateway.start()
        receipt = open_.append(ids("aB" * 20_000), ids("C" * 20_000))
        wait_until(lambda: publisher.statistics().num_retries > 2, describe="some tries")
        own_server.restart()

        receipt.result(60)
        open_.seal(1.0)

    with connect(own_server.url) as client:
        assert RunReader(client, own_run).states() == {"g/0/0": "sealed"}
