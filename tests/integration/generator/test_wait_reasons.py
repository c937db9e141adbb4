"""Every wait of a generator that ends without data says by type what holds it, and since when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
import redis

from testkit import group, ids, wait_until
from testkit.services.stores import Store
from testkit.waiting import all_facts, facts, kinds
from turnstream.errors import ConflictError, NotReadyError, UnavailableError, WaitKind
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.generator.outbox.receipts import Receipt
from turnstream.store.client import keys
from turnstream.store.run.tasks import Prompt, add_prompts
from turnstream.store.waits.version_wait import wait_for_version

pytestmark = pytest.mark.redis

GROUP, WRITER, OTHER = "maze 7/b#1", "host:7/gpu", "host:8/gpu"
ONE_GROUP = {"batch_groups": 1, "max_staleness": 0, "max_planned_ahead": 0}


def is_asked_of_it(receipt: Receipt) -> bool:
    """Whether a silent store has been sent what is waited for."""
    with pytest.raises(NotReadyError) as waited:
        receipt.result(0)
    return WaitKind.STORE_AWAY in kinds(waited.value)


def ended(call: Callable[..., object], *args: float, **kwargs: float) -> UnavailableError:
    with pytest.raises(NotReadyError) as caught:
        call(*args, **kwargs)
    return caught.value


def lapse(client: redis.Redis, run: str, trajectory: str, *, ago_s: float) -> None:
    """Let the lease of a dead generator end."""
    seconds, _ = client.time()
    client.zadd(keys.run_keys(run).leases, {trajectory: (seconds - ago_s) * 1000})


def plan(client: redis.Redis, run: str, *, step: int, num_groups: int) -> None:
    """Write the counters of a planned step, as the planner does."""
    where = keys.run_keys(run).frontier
    client.hset(where, mapping={"planned": step, "planned_groups": num_groups, "open_groups": 0})
    seconds, _ = client.time()
    client.hset(keys.run_keys(run).times, f"planned:{step}", (seconds - 40) * 1_000)
    client.hdel(where, "session_ms")


def test_admission_wait_names_the_lost_generator_and_its_silence(store: Store) -> None:
    run = store.new_run(**ONE_GROUP)
    with Publisher(store.url, run, writer=WRITER) as dead:
        for sample in (0, 1):
            member = dead.trajectory("a", sample, num_samples=2)
            member.append(ids("ab"), ids("c")).result(10)
    lapse(store.client, run, "a/0/0", ago_s=60)
    lapse(store.client, run, "a/1/0", ago_s=40)

    with (
        Publisher(store.url, run, admission_timeout_s=0.1) as publisher,
        pytest.raises(NotReadyError) as caught,
        publisher.group("b", 2),
    ):
        pass

    waited, _, starved, gone, held, _, capacity = all_facts(caught.value)
    assert kinds(caught.value) == [
        *(WaitKind.NO_ADMISSION, WaitKind.BATCHER_AWAY, WaitKind.TOO_FEW_READY),
        *[WaitKind.GENERATOR_GONE] * 3,
        WaitKind.OUT_OF_CAPACITY,
    ]
    assert (waited["group"], waited["samples"], 0.1 <= waited["waited_s"] < 10) == ("b", 2, True)
    assert (gone["writer"], gone["open"], 39 < gone["silent_s"] < 59) == (WRITER, 2, True)
    assert (held["group"], held["sample"], held["writer"]) == ("a", 0, WRITER)
    assert held["lease_left_s"] < -59
    assert {"live": 1, "most": 1, "stepped": 0}.items() <= capacity.items()
    assert max(capacity["since_s"], starved["since_s"]) < 60


async def test_waits_for_work_and_versions_name_what_is_missing(store: Store) -> None:
    run = store.new_run()
    add_prompts(store.client, run, [Prompt(prompt_uid="p", payload=b"", num_samples=1)])
    plan(store.client, run, step=1, num_groups=1)
    store.client.hset(keys.run_keys(run).frontier, mapping={"session_epoch": 3, "session": "s"})

    def blocked() -> list[UnavailableError]:
        with (
            Publisher(store.url, run, writer="slow") as slow,
            slow.next_task(10),
            Publisher(store.url, run) as publisher,
        ):
            return [ended(publisher.next_task, 0.01), ended(publisher.next_refill, 0.01)]

    task, refill = await asyncio.to_thread(blocked)
    version = ended(partial(wait_for_version, store.client, run, above=3), timeout_s=0.01)
    async with AsyncPublisher(store.url, run) as other:
        for wait, error in ((other.next_task, task), (other.next_refill, refill)):
            with pytest.raises(NotReadyError) as awaited:
                await wait(0.01)
            assert awaited.value.reasons[0].facts["awaited"] == error.reasons[0].facts["awaited"]

    expected: dict[str, dict[str, object]] = {
        "task": {"prompts": 1, "left": 0, "given": 1},
        "refill": {"granted": 0, "open": 1, "deadline_policy": "drop"},
        "version": {"above": 3, "newest_version": None, "stepped": 0},
    }
    for error, (awaited, wanted) in zip((task, refill, version), expected.items(), strict=True):
        first = facts(error, WaitKind.NOT_READY)
        assert first == {"awaited": awaited, "waited_s": 0.01, **wanted}
    assert "no prompt is left" in task.message
    held = facts(task, WaitKind.MEMBER_OPEN)
    assert (held["group"], held["writer"], held["state"]) == ("p#1", "slow", "open")
    assert facts(version, WaitKind.TRAINER_NOT_STEPPED)["session_epoch"] == 3


def test_disk_wait_ends_with_the_time_left(store: Store) -> None:
    run = store.new_run()

    with Publisher(store.url, run, keep_s=30) as publisher:
        publisher.publish(group("a")).result(10)
        with pytest.raises(NotReadyError) as caught:
            publisher.flush_to_disk(0.05)

    proof = facts(caught.value, WaitKind.NOT_READY)
    assert (proof["awaited"], proof["keep_s"]) == ("disk", 30)
    assert 0 < proof["left_s"] <= 30


def test_wait_for_space_times_out_with_the_holders(own_store: Store) -> None:
    run = own_store.new_run()

    with Publisher(own_store.url, run, max_inflight_bytes=1, timeout_s=0.1) as publisher:
        writer = publisher.trajectory("g", 0, num_samples=1)
        writer.append(ids("a"), ids("b")).result(10)
        own_store.client.client_pause(20_000, all=False)  # the store is up, and answers no write
        stuck = writer.append(ids("abc"), ids("d"))
        wait_until(lambda: is_asked_of_it(stuck), describe="a round on its way")
        with pytest.raises(
            NotReadyError, match=r"no capacity for .* writes .* within 0\.1 s"
        ) as caught:
            writer.append(ids("abcde"), ids("f"))
        own_store.client.client_unpause()
        stuck.result(10)
        writer.append(ids("abcde"), ids("f")).result(10)
        writer.abandon("over")

    space, unacknowledged, silent = all_facts(caught.value)
    assert (space["inflight_bytes"] > 1, space["max_inflight_bytes"]) == (True, 1)
    assert (unacknowledged["turn"], silent["since_s"] > 0) == (1, True)


async def test_finished_group_waits_for_capacity_until_both_timeouts(own_store: Store) -> None:
    run = own_store.new_run()

    async with AsyncPublisher(
        own_store.url, run, max_inflight_bytes=1, timeout_s=0.1, admission_timeout_s=0.1
    ) as publisher:
        await (await publisher.publish(group("a")))
        own_store.client.client_pause(20_000, all=False)
        stuck = await publisher.publish(group("b"))
        with pytest.raises(
            NotReadyError, match=r"no capacity for .* writes .* within 0\.2 s"
        ) as caught:
            await publisher.publish(group("c"))
        own_store.client.client_unpause()
        await stuck

    assert facts(caught.value, WaitKind.NOT_ACKNOWLEDGED)["unadmitted_bytes"] > 0
    assert caught.value.reasons[1].facts["group"] == "b"


def test_second_writer_gets_the_name_of_the_first(store: Store) -> None:
    run = store.new_run()

    with (
        Publisher(store.url, run, writer=WRITER) as first,
        Publisher(store.url, run, writer=OTHER) as second,
    ):
        first.trajectory(GROUP, 0, num_samples=2).append(ids("ab"), ids("c")).result(10)

        with pytest.raises(ConflictError, match=rf"^{GROUP}/0/0 is being written by {WRITER}$"):
            second.trajectory(GROUP, 0, num_samples=2).__enter__()
        with pytest.raises(ConflictError, match=rf"^{GROUP}/0/0 is being written by {WRITER}$"):
            second.adopt(GROUP, 0)
        with pytest.raises(ConflictError, match=rf"^group {GROUP} was opened with 2 samples"):
            second.trajectory(GROUP, 1, num_samples=3).__enter__()
