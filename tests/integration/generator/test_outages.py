from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import redis

from testkit import group, ids, servers, trajectory, turn, wait_until
from testkit.stores import Store, lose_answer
from turnstream.errors import (
    InvalidConfigError,
    NotReadyError,
    RejectedError,
    StoreUnavailableError,
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


def test_server_killed_in_mid_stream_ends_with_every_turn_once(own_store: Store) -> None:
    run = own_store.new_run()

    with Publisher(own_store.url, run) as publisher:
        episodes = [publisher.trajectory("g", sample, num_samples=4) for sample in range(4)]
        half_way = threading.Barrier(len(episodes) + 1)
        players = [threading.Thread(target=play, args=(e, half_way), daemon=True) for e in episodes]
        for player in players:
            player.start()
        half_way.wait(10)
        own_store.server.kill()
        wait_until(lambda: publisher.statistics().num_retries > 4, describe="failing writes")
        own_store.server.restart()
        for player in players:
            player.join(20)
        statistics = publisher.statistics()

    stored = own_store.read(run)
    assert stored.counts() == {"accepted": 4, "sealed": 4}
    assert sorted(stored.sealed()) == [TrajectoryKey("g", sample) for sample in range(4)]
    for key in stored.sealed():
        assert stored.spelled(key) == [("a" * number, "b") for number in range(1, 61)]
    assert statistics.num_turns == 240


def play(episode: TrajectoryWriter, half_way: threading.Barrier) -> None:
    for number in range(1, 61):
        episode.append(ids("a" * number), ids("b"))
        if number == 30:
            half_way.wait(10)
    episode.seal(1.0)


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
        lose_answer(proxy, "append")
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


@pytest.mark.parametrize("num_answered", [0, 1, 2, 3])
def test_a_group_whose_replies_are_lost_anywhere_arrives_once(
    store: Store, proxy_to: Callable[[str], Any], num_answered: int
) -> None:
    run = store.new_run()
    proxy = proxy_to(store.url)

    with Publisher(proxy.url, run) as publisher:
        publisher.publish(group("first")).result(10)
        for number in range(num_answered):
            publisher.publish(group(f"before-{number}"))
        proxy.break_replies([0])
        publisher.publish(group("g")).result(10)

    stored = store.read(run)
    num_trajectories = 2 * (num_answered + 2)
    assert proxy.num_breaks == 1
    assert stored.counts() == {"accepted": num_trajectories, "sealed": num_trajectories}
    assert len(stored.events()) == 3 * (num_answered + 2)
    assert stored.spelled(KEY) == [("ab", "cd")]


def test_a_full_server_holds_writes_up_until_there_is_memory(own_store: Store) -> None:
    run = own_store.new_run()
    long = trajectory(turn("a" * 20_000, "B"))

    with Publisher(own_store.url, run, max_inflight_bytes=200_000) as publisher:
        publisher.publish(group("before", long)).result(10)
        with publisher.group("open", 20) as opened:
            writers = [opened.trajectory(sample) for sample in range(20)]
            own_store.client.config_set("maxmemory", used_memory(own_store.client) + 300_000)
            generator = threading.Thread(target=lambda: write_all(writers, long), daemon=True)
            generator.start()
            wait_until(lambda: publisher.statistics().num_retries > 3, describe="a full server")
            is_blocked = generator.is_alive()
            inflight_bytes = publisher.statistics().inflight_bytes
            own_store.client.config_set("maxmemory", 0)
            generator.join(20)

    assert is_blocked
    assert 0 < inflight_bytes <= 200_000
    assert own_store.read(run).counts() == {"accepted": 21, "sealed": 21}


def write_all(writers: Sequence[TrajectoryWriter], whole: Trajectory) -> None:
    (only,) = whole.turns
    for writer in writers:
        writer.append(only.prompt_ids, only.response_ids, logprobs=only.logprobs)
    for writer in writers:
        writer.seal(1.0)


def used_memory(client: redis.Redis) -> int:
    memory: Any = client.info("memory")
    return memory["used_memory"]


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
        publisher.publish(group("before")).result(10)
        own_store.server.kill()
        receipt = publisher.publish(group("g"))
        with pytest.raises(NotReadyError, match=r"within 0\.05 s") as slow:
            receipt.result(0.05)
        assert slow.value.retry_after_s is None
        with pytest.raises(NotReadyError, match=r"after 0\.05 s"):
            publisher.flush(0.05)
        own_store.server.restart()
        receipt.result(10)

    assert own_store.read(run).counts() == {"accepted": 4, "sealed": 4}


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


def num_groups_of_writes(client: redis.Redis) -> int:
    commands: Any = client.info("commandstats")
    return commands.get("cmdstat_exec", {"calls": 0})["calls"]


def append_side_by_side(client: redis.Redis, publisher: Publisher, *, num_turns: int) -> None:
    """Append to eight trajectories while the store is paused, then seal them."""
    episodes = [publisher.trajectory("g", sample, num_samples=8) for sample in range(8)]
    for episode in episodes:
        episode.append(ids("a"), ids("b")).result(10)
    client.client_pause(60_000, all=False)
    for number in range(2, num_turns + 1):
        for episode in episodes:
            episode.append(ids("a" * number), ids("b"))
    client.client_unpause()
    for episode in episodes:
        episode.seal(1.0)


def test_many_turns_become_few_writes_to_disk(forcing_store: Store) -> None:
    run = forcing_store.new_run()

    with Publisher(forcing_store.url, run) as publisher:
        append_side_by_side(forcing_store.client, publisher, num_turns=40)

    stored = forcing_store.read(run)
    assert stored.counts() == {"accepted": 8, "sealed": 8}
    assert [len(stored.spelled(key)) for key in stored.sealed()] == [40] * 8
    assert 0 < num_groups_of_writes(forcing_store.client) < 40


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
