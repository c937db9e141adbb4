"""Tasks that a restarted store has lost: their prompts are granted to no other generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import group, ids
from testkit.stores import Store
from turnstream.errors import StoreBehindError
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.run.tasks import Prompt, add_prompts, read_prompt_counts
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

PastOf = Callable[[EmbeddedServer], Any]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_task_granted_again_to_its_owner_is_skipped(
    own_store: Store, past_of: PastOf, is_sealed: bool
) -> None:
    # Both were written under one name, and acknowledged turns of the first were refused.
    run = own_store.new_run()
    prompts = [Prompt(prompt_uid=uid, payload=b"", num_samples=1) for uid in "ab"]
    add_prompts(own_store.client, run, prompts)

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
    prompts = [Prompt(prompt_uid=uid, payload=b"", num_samples=1) for uid in "abcda"]
    add_prompts(own_store.client, run, prompts)

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


def test_lost_earlier_prompts_stay_available_to_other_generators(
    own_store: Store, past_of: PastOf
) -> None:
    # The generator of the first died with what it had; the second is still there.
    run = own_store.new_run()
    prompts = [Prompt(prompt_uid=uid, payload=b"", num_samples=1) for uid in ("a", "b")]
    add_prompts(own_store.client, run, prompts)

    with (
        Publisher(own_store.url, run, writer="dies", keep_s=0.0) as dying,
        Publisher(own_store.url, run, writer="lives", keep_s=60.0) as publisher,
    ):
        past = past_of(own_store.server)
        take_and_write(dying)
        take_and_write(publisher)
        past.come_back()
        publisher.publish(group("h")).result(10)
        publisher.flush()
        counts = read_prompt_counts(own_store.client, run)
        name = take_and_write(publisher)

    assert (counts.num_given, counts.num_left) == (1, 1)
    assert name == "a#1"
    assert read_prompt_counts(own_store.client, run).num_given == 2


@pytest.mark.parametrize("is_trained", [False, True])
def test_task_is_refused_if_the_end_of_its_last_group_was_lost(
    own_store: Store, past_of: PastOf, is_trained: bool
) -> None:
    # The store went on with the group before, took the later one too, and both were trained.
    run = own_store.new_run()
    add_prompts(own_store.client, run, [Prompt(prompt_uid="a", payload=b"", num_samples=1)])

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
