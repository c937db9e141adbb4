"""Tasks of generators: taken, written, abandoned, and never lost with a reply."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import group, ids
from testkit.runs.scripts import script
from testkit.services.stores import Store
from testkit.waiting import entered, finish
from turnstream.errors import NotReadyError, StoreBehindError
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.store.client import keys
from turnstream.store.run.tasks import Prompt, add_prompts, read_prompt_counts
from turnstream.types import TrajectoryKey
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis


def give(client: redis.Redis, run: str, *uids: str, num_samples: int = 2) -> None:
    prompts = [
        Prompt(prompt_uid=uid, payload=f"what is {uid}?".encode(), num_samples=num_samples)
        for uid in uids
    ]
    add_prompts(client, run, prompts)


def write(trajectory: Any) -> None:
    trajectory.append([1], [2]).result(10)
    trajectory.append([1, 2, 3], [4])
    trajectory.seal(reward=float(trajectory.key.sample))


@pytest.mark.parametrize("kind", [Publisher, AsyncPublisher])
async def test_task_is_a_prompt_with_a_writer_per_sample(store: Store, kind: Any) -> None:
    run = store.new_run()
    give(store.client, run, "a")

    async with entered(kind(store.url, run)) as publisher:
        async with entered(await finish(lambda: publisher.next_task(10))) as task:
            for trajectory in task.trajectories:
                await finish(lambda trajectory=trajectory: trajectory.append([1], [2]))
                await finish(lambda trajectory=trajectory: trajectory.seal(reward=1.0))
        with pytest.raises(NotReadyError, match="1 of 1 are given out"):
            await finish(lambda: publisher.next_task(0.05))
        statistics = publisher.statistics()

    assert (statistics.num_restarts, statistics.num_lost) == (0, 0)
    assert (task.prompt_uid, task.payload) == ("a", b"what is a?")
    assert (task.group_id, task.num_samples, task.num_needed) == ("a#1", 2, 2)
    assert store.read(run).sealed() == [TrajectoryKey("a#1", 0), TrajectoryKey("a#1", 1)]
    assert store.read(run).counts() == {"accepted": 2, "sealed": 2}


def test_unsealed_trajectory_of_a_task_is_abandoned(store: Store) -> None:
    run = store.new_run()
    give(store.client, run, "a", "b")

    with Publisher(store.url, run) as publisher:
        with publisher.next_task(10) as task:
            write(task.trajectories[0])
        with pytest.raises(RuntimeError), publisher.next_task(10):
            raise RuntimeError("the environment broke")

    ledger = store.read(run).ledger()
    assert ledger["a%231/1/0"] == "abandoned:left without a seal"
    assert ledger["b%231/0/0"] == "abandoned:RuntimeError: the environment broke"
    assert store.read(run).counts() == {"accepted": 4, "sealed": 1, "abandoned": 3}


@pytest.mark.parametrize("name", ["next_task", "open_group"])
def test_lost_reply_neither_loses_nor_doubles_a_task(
    store: Store, proxy_to: Callable[[str], Any], name: str
) -> None:
    run, proxy = store.new_run(), proxy_to(store.url)
    give(store.client, run, "a", "b")

    with Publisher(proxy.url, run) as publisher:
        with publisher.next_task(10) as first:
            for trajectory in first.trajectories:
                write(trajectory)
        publisher.flush()
        proxy.break_replies([0], request=script(name).sha.encode())
        with publisher.next_task(10) as second:
            for trajectory in second.trajectories:
                write(trajectory)

    assert proxy.num_breaks == 1
    assert (first.group_id, second.group_id) == ("a#1", "b#1")
    assert store.read(run).counts() == {"accepted": 4, "sealed": 4}
    assert read_prompt_counts(store.client, run).num_given == 2


def test_task_wait_ends_with_the_reason(store: Store) -> None:
    run = store.new_run(batch_groups=1, max_staleness=0, max_planned_ahead=0)

    with Publisher(store.url, run) as publisher:
        with pytest.raises(NotReadyError, match=r"no task within 0\.05 s: the run was given no"):
            publisher.next_task(0.05)
        give(store.client, run, "a", "b")
        with publisher.next_task(10):
            with pytest.raises(NotReadyError, match="1 groups are live, 1 are allowed after"):
                publisher.next_task(0.05)

            def free() -> None:
                store.wait_for_blocked(1)
                store.read(run).frees_capacity(stepped=1)

            freeing = threading.Thread(target=free, daemon=True)
            freeing.start()
            with publisher.next_task(30) as second:
                pass
            freeing.join()

    assert second.prompt_uid == "b"


PastOf = Callable[[EmbeddedServer], Any]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_task_granted_again_to_its_owner_is_skipped(
    own_store: Store, past_of: PastOf, is_sealed: bool
) -> None:
    # Both were written under one name, and acknowledged turns of the first were refused.
    run = own_store.new_run()
    give(own_store.client, run, "a", "b", num_samples=1)

    with Publisher(own_store.url, run, keep_s=60.0) as publisher:
        past = past_of(own_store.server)
        with publisher.next_task(10) as first:
            (episode,) = first.trajectories
            episode.append(ids("ab"), ids("c")).result(10)
            if is_sealed:
                episode.seal(1.0)
                publisher.flush()
            past.come_back()
            with publisher.next_task(10) as second:
                write_one(second)
            if not is_sealed:
                episode.seal(1.0)
        publisher.flush()
        statistics = publisher.statistics()

    assert (first.prompt_uid, second.prompt_uid) == ("a", "b")
    assert own_store.read(run).counts() == {"accepted": 2, "sealed": 2}
    assert statistics.num_lost == 0


def test_prompt_of_a_lost_task_is_not_granted_again(own_store: Store, past_of: PastOf) -> None:
    # The group was opened again without its prompt. Then the prompt was granted to another
    # generator, and trained twice.
    run = own_store.new_run()
    give(own_store.client, run, *"abcda", num_samples=1)

    with Publisher(own_store.url, run, keep_s=60.0) as publisher:
        take_and_write(publisher)
        with publisher.next_task(10):  # given up: "b" is to be given out again
            pass
        publisher.flush()
        give_again(own_store.client, run, "b#1")
        past = past_of(own_store.server)
        names = [take_and_write(publisher) for _ in range(3)]
        publisher.flush()
        past.come_back()
        publisher.publish(group("h")).result(10)
        publisher.flush()
        counts = read_prompt_counts(own_store.client, run)
        tasks: Any = own_store.client.hgetall(keys.run_keys(run).tasks)
        name = take_and_write(publisher)

    assert (names, name) == (["b#2", "c#1", "d#1"], "a#2")
    assert (counts.num_given, counts.num_left) == (4, 1)
    assert tasks == {b"a%231": b"1", b"b%232": b"2", b"c%231": b"3", b"d%231": b"4"}


def give_again(client: redis.Redis, run: str, group_id: str) -> None:
    """Settle a group whose only sample was abandoned, as a leader does."""
    names, name = keys.run_keys(run), keys.encode_name(group_id)
    number: Any = client.hget(names.tasks, name)
    client.hset(names.groups, name, "1:incomplete")
    client.hdel(names.tasks, name)
    client.zadd(names.retry, {number: int(number)})


def write_one(task: Any) -> None:
    (episode,) = task.trajectories
    episode.append(ids("ab"), ids("c")).result(10)
    episode.seal(1.0)


def take_and_write(publisher: Publisher) -> str:
    with publisher.next_task(10) as task:
        write_one(task)
    return task.group_id


@pytest.mark.parametrize("is_trained", [False, True])
def test_task_is_refused_if_the_end_of_its_last_group_was_lost(
    own_store: Store, past_of: PastOf, is_trained: bool
) -> None:
    # The store went on with the group before, took the later one too, and both were trained.
    run = own_store.new_run()
    give(own_store.client, run, "a", num_samples=1)

    with Publisher(own_store.url, run, keep_s=60.0) as publisher:
        assert take_and_write(publisher) == "a#1"
        publisher.flush()
        past = past_of(own_store.server)
        give_again(own_store.client, run, "a#1")
        assert take_and_write(publisher) == "a#2"
        publisher.flush()
        past.come_back()
        if is_trained:
            train(own_store.client, run, "a#1")
        publisher.publish(group("h")).result(10)
        with pytest.raises(
            StoreBehindError, match=r"a#2/0/0 was acknowledged, .* as an earlier group"
        ):
            publisher.flush()
        counts = read_prompt_counts(own_store.client, run)

    names: Any = own_store.client.hkeys(keys.run_keys(run).groups)
    assert sorted(names) == [b"a%231", b"h"]
    assert (counts.num_given, counts.num_left) == (0 if is_trained else 1, 0)


def train(client: redis.Redis, run: str, group_id: str) -> None:
    """Plan a group, as a leader does."""
    names, name = keys.run_keys(run), keys.encode_name(group_id)
    number: Any = client.hget(names.tasks, name)
    client.hset(names.groups, name, "1:planned")
    client.hdel(names.tasks, name)
    client.hdel(names.prompts, number)
    client.hincrby(names.prompts, "done", 1)
