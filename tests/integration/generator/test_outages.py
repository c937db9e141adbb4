from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from testkit import group, ids, trajectory, turn, wait_until
from testkit.services import servers
from testkit.services.stores import Store, lose_answer
from testkit.waiting import facts, kinds
from turnstream.errors import (
    InvalidConfigError,
    NotReadyError,
    RejectedError,
    StoreUnavailableError,
    WaitKind,
)
from turnstream.generator import Publisher
from turnstream.generator.api.trajectory_writers import TrajectoryWriter
from turnstream.generator.transport import sender
from turnstream.store.client.connection import connect
from turnstream.types import Trajectory, TrajectoryKey
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

own_server = servers.own_server_of_each_kind  # a store that ends, loads or is full

KEY = TrajectoryKey("g", 0)


def test_turn_is_sent_once_over_a_slow_link(
    store: Store, proxy_to: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = store.new_run()
    monkeypatch.setattr(sender, "SOCKET_TIMEOUT_S", 2.0)
    proxy = proxy_to(store.url)
    proxy.requests.bytes_per_s = 5e5

    with Publisher(proxy.url, run) as publisher:
        prompt = np.random.default_rng(0).integers(0, 1 << 30, 500_000)
        publisher.trajectory("g", 0, num_samples=1).append(prompt, [1]).result(60)
        statistics = publisher.statistics()

    assert statistics.num_retries == 0


def test_a_reply_lost_after_the_write_was_applied_leaves_one_copy(
    store: Store, proxy_to: Callable[[str], Any], without_heartbeats: None
) -> None:
    run = store.new_run()
    proxy = proxy_to(store.url)

    with Publisher(proxy.url, run) as publisher:
        episode = publisher.trajectory("g", 0, num_samples=1)
        episode.append(ids("ab"), ids("c")).result(10)
        proxy.break_replies([0], request=b"NOMKSTREAM")  # a later turn needs no script
        episode.append(ids("abc"), ids("d")).result(10)
        after_append = publisher.statistics()
        lose_answer(proxy, "append")
        episode.seal(1.0)
        after_seal = publisher.statistics()

    assert proxy.num_breaks == 2
    assert (after_append.num_duplicates, after_append.num_retries) == (1, 1)
    assert (after_seal.num_duplicates, after_seal.num_trajectories) == (2, 1)
    assert store.read(run).spelled(KEY) == [("ab", "c"), ("abc", "d")]
    assert store.read(run).counts() == {"accepted": 1, "sealed": 1}
    assert store.read(run).sealed() == [KEY]


def test_an_outage_longer_than_the_timeout_fails_what_was_accepted(own_store: Store) -> None:
    run = own_store.new_run()
    publisher = Publisher(own_store.url, run, timeout_s=0.3)
    idle = publisher.trajectory("idle", 0, num_samples=1)
    idle.append(ids("ab"), ids("c")).result(10)
    own_store.server.kill()

    with pytest.raises(StoreUnavailableError, match=r"took no writes for 0\.3 s") as away:
        publisher.publish(group("g")).result(10)
    assert away.value.retry_after_s == 1.0
    own_store.server.restart()
    idle.append(ids("abc"), ids("d"))
    idle.seal(1.0)
    publisher.publish(group("h")).result(10)
    publisher.close()

    assert own_store.read(run).states() == {
        "idle/0/0": "sealed",
        "h/0/0": "sealed",
        "h/1/0": "sealed",
    }


def test_a_wait_for_an_answer_ends_by_its_own_deadline(own_store: Store) -> None:
    run = own_store.new_run()

    with Publisher(own_store.url, run) as publisher:
        writer = publisher.trajectory("g#1", 0, num_samples=1)
        writer.append(ids("a"), ids("b")).result(10)
        own_store.server.kill()
        late = writer.append(ids("abc"), ids("d"))
        wait_until(lambda: publisher.statistics().num_retries > 0, describe="a failed try")
        with pytest.raises(NotReadyError, match=r"within 0\.05 s") as waited:
            late.result(0.05)
        with pytest.raises(NotReadyError, match=r"after 0\.05 s") as flushed:
            publisher.flush(0.05)
        own_store.server.restart()
        late.result(10)
        writer.seal(1.0)

    assert waited.value.retry_after_s is None
    turn = facts(waited.value, WaitKind.NOT_ACKNOWLEDGED)
    assert (turn["group"], turn["sample"], turn["turn"], turn["turns_waiting"]) == ("g#1", 0, 1, 1)
    assert waited.value.reasons[0].sentence.startswith("turn 1 of g#1/0/0 is not acknowledged")
    away = facts(waited.value, WaitKind.STORE_AWAY)
    assert min(turn["silent_s"], away["since_s"]) > 0
    assert "the store cannot be reached" in away["why"]
    assert kinds(flushed.value)[:2] == [WaitKind.NOT_ACKNOWLEDGED, WaitKind.STORE_AWAY]
    assert own_store.read(run).counts() == {"accepted": 1, "sealed": 1}


def test_a_password_that_is_wrong_is_no_outage(own_store: Store) -> None:
    run = own_store.new_run()
    own_store.client.config_set("requirepass", "right")
    url = own_store.url.replace("redis://", "redis://:wrong@")

    with Publisher(url, run) as publisher, pytest.raises(RejectedError, match="denied access"):
        publisher.publish(group("g")).result(10)

    own_store.client.execute_command("AUTH", "right")
    own_store.client.config_set("requirepass", "")


@pytest.mark.parametrize(
    ("setting", "value"), [("appendfsync", "no"), ("no-appendfsync-on-rewrite", "yes")]
)
def test_store_with_unsafe_sync_settings_receives_no_writes(
    own_store: Store, setting: str, value: str
) -> None:
    run = own_store.new_run()
    before: Any = own_store.client.config_get(setting)
    (safe,) = before.values()
    own_store.client.config_set(setting, value)

    with Publisher(own_store.url, run) as publisher:
        for name in ("g0", "g1"):
            with pytest.raises(
                InvalidConfigError, match=f"{setting}: the store at .* has '{value}'"
            ):
                publisher.publish(group(name)).result(10)

    own_store.client.config_set(setting, safe)  # the fixtures connect again


@pytest.fixture
def forcing_store(new_run: Callable[..., str]) -> Iterator[Store]:
    with EmbeddedServer(durability="fsync") as server, connect(server.url) as client:
        yield Store(server, client, new_run)


def test_full_store_takes_stored_seals_and_later_the_rest(forcing_store: Store) -> None:
    run = forcing_store.new_run()
    long = trajectory(turn("a" * 20_000, "B"))

    with Publisher(forcing_store.url, run) as publisher:
        publisher.publish(group("before", long)).result(10)
        with publisher.group("open", 20) as opened, ThreadPoolExecutor(20) as generators:
            used: Any = forcing_store.client.info("memory")
            forcing_store.client.config_set("maxmemory", used["used_memory"] + 300_000)
            ends = [
                generators.submit(write, opened.trajectory(sample), long) for sample in range(20)
            ]
            wait_until(lambda: publisher.statistics().num_retries > 50, describe="a full server")
            when_full = forcing_store.read(run).counts()
            forcing_store.client.config_set("maxmemory", 0)
            for end in ends:
                end.result(20)

    assert 0 < when_full["sealed"] < 21
    assert forcing_store.read(run).counts() == {"accepted": 21, "sealed": 21}


def write(writer: TrajectoryWriter, whole: Trajectory) -> None:
    (only,) = whole.turns
    writer.append(only.prompt_ids, only.response_ids, logprobs=only.logprobs)
    writer.seal(1.0)
