"""Tasks of generators: taken, written, abandoned, and never lost with a reply."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit.scripts import script
from testkit.stores import Store
from testkit.waiting import entered, finish
from turnstream.errors import EndOfRunError, NotReadyError, PromptsExhaustedError
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.store.run.runs import close_run
from turnstream.store.run.tasks import Prompt, add_prompts, read_prompt_counts
from turnstream.types import TrajectoryKey

pytestmark = pytest.mark.redis


# Prints the group that it is offered, and does not open it.
OFFERED = """
import sys
import time
from turnstream.store.client.connection import connect
from turnstream.store.client.scripts import run_command
from turnstream.store.run.tasks import next_task_command, parse_offer

url, run = sys.argv[1:]
with connect(url) as client:
    print(parse_offer(run_command(client, next_task_command(run))).group.group_id, flush=True)
    time.sleep(60)
"""


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


def test_offer_of_killed_generator_goes_to_the_next(store: Store) -> None:
    run = store.new_run()
    give(store.client, run, "a", "b")
    program = [sys.executable, "-c", OFFERED, store.url, run]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        offered = process.stdout and process.stdout.readline().strip()
        process.kill()

    with Publisher(store.url, run) as publisher:
        taken = []
        for _ in range(2):
            with publisher.next_task(10) as task:
                taken.append(task.group_id)
                for trajectory in task.trajectories:
                    write(trajectory)

    assert process.returncode == -signal.SIGKILL
    assert offered == "a#1"
    assert taken == ["a#1", "b#1"]
    assert read_prompt_counts(store.client, run).num_given == 2


async def test_each_prompt_goes_to_one_of_many_waiting_generators(store: Store) -> None:
    run = store.new_run()

    async with AsyncPublisher(store.url, run) as one, AsyncPublisher(store.url, run) as other:
        waiting = [
            asyncio.ensure_future(each.next_task(30)) for each in (one, other) for _ in range(2)
        ]
        await asyncio.to_thread(store.wait_for_blocked, 4)
        await asyncio.to_thread(give, store.client, run, "a", "b", "c")
        left = set(waiting)
        while len(left) > 1:
            _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(store.wait_for_blocked, len(left))
        left.pop().cancel()
        tasks = [each.result() for each in waiting if each.done()]
        for task in tasks:
            async with task:
                pass

    assert sorted(task.prompt_uid for task in tasks) == ["a", "b", "c"]


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


def test_exhausted_and_closed_runs_raise_their_own_errors(store: Store) -> None:
    run = store.new_run()
    give(store.client, run, "a")

    with Publisher(store.url, run) as publisher:
        with publisher.next_task(10):
            pass
        store.client.hset(store.read(run).keys.prompts, "done", 1)
        with pytest.raises(PromptsExhaustedError, match="all 1 prompts of the run are done"):
            publisher.next_task(0.05)
        close_run(store.client, run)
        with pytest.raises(EndOfRunError):
            publisher.next_task(10)
