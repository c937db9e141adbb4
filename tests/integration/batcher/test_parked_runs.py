"""Idle runs are parked at no cost, and every kind of work wakes them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import pytest

from testkit import group, ids, wait_until_async
from testkit.scripts import script
from turnstream.errors import NotReadyError, WaitKind
from turnstream.generator import Publisher
from turnstream.records.events import decode_event, encode_event
from turnstream.store.client import keys
from turnstream.store.client.connection import connect, connect_async
from turnstream.store.client.scripts import run_command
from turnstream.store.run.revisions import read_revisions, revise_config
from turnstream.store.run.runs import close_run, pause_run, reopen_run, resume_run
from turnstream.store.run.tasks import Prompt, add_prompts
from turnstream.store.waits.read_waits import read_waits
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import DeadlineFired, Event, GroupOpened, Purpose
from turnstream_server.batcher.planner import parking
from turnstream_server.batcher.serving.run_discovery import RunDiscovery
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.bus.planning.replans import request_replan
from turnstream_server.bus.queries.run_snapshot import read_snapshot
from turnstream_server.bus.sessions.observers import declare_observer

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

LEASE_S = 0.5
PARK_AFTER_S = 0.1
Words = dict[str, Any]
"""Values that pass from the preparation of a run to its work."""


def leader(house: Any, run: str) -> dict[bytes, bytes]:
    names = (b"epoch", b"owner", b"parked")
    with connect(house.url) as client:
        found: Any = client.hmget(keys.run_keys(run).leader, *names)
    return {name: value for name, value in zip(names, found, strict=True) if value is not None}


async def until(what: str, condition: Callable[[], object]) -> None:
    await wait_until_async(lambda: bool(condition()), describe=what)


async def until_parked(house: Any, run: str) -> int:
    """The epoch of the leader that has parked the run."""
    await until("a parked run", lambda: b"parked" in leader(house, run))
    return int(leader(house, run)[b"epoch"])


async def until_led(house: Any, run: str, *, after: int) -> None:
    """Wait until another term has started; it may be finished already."""
    await until("a leader", lambda: int(leader(house, run).get(b"epoch", 0)) > after)


def has_event(house: Any, run: str, kind: type[Event]) -> bool:
    with connect(house.url) as client:
        found: Any = client.xrange(keys.run_keys(run).events)
    return any(isinstance(decode_event(fields[b"r"]), kind) for _, fields in found)


# ------------------------------------------------------------------------- kinds of work


async def nothing(house: Any, run: str, trainer: Any, words: Words) -> None:
    """An empty run needs no preparation."""


async def open_group(house: Any, run: str, trainer: Any, words: Words) -> None:
    await house.publish(run, group("g0"))


async def open_part_of_a_group(house: Any, run: str, trainer: Any, words: Words) -> None:
    """Seal one sample of a group of two, so that the open group has no lease."""

    def send() -> None:
        with Publisher(house.url, run) as publisher:
            trajectory = publisher.trajectory("g0", 0, num_samples=2)
            trajectory.append(ids("ab"), ids("c"))
            trajectory.seal(1.0)

    await asyncio.to_thread(send)


async def open_the_rest(house: Any, run: str, trainer: Any, words: Words) -> None:
    """Open the other sample, which adds a lease and no event."""
    open_silently(house, run, sample=1)


async def evaluate(house: Any, run: str, trainer: Any, words: Words) -> None:
    await house.publish(run, dataclasses.replace(group("e0"), purpose=Purpose.EVAL))


async def give_prompts(house: Any, run: str, trainer: Any, words: Words) -> None:
    with connect(house.url) as client:
        add_prompts(client, run, [Prompt(prompt_uid="p0", payload=b"", num_samples=1)])


async def take_task(house: Any, run: str, trainer: Any, words: Words) -> None:
    def take() -> None:
        with Publisher(house.url, run) as publisher:
            publisher.next_task(10).trajectories[0].append(ids("ab"), ids("c")).result(10)

    await asyncio.to_thread(take)


async def close(house: Any, run: str, trainer: Any, words: Words) -> None:
    with connect(house.url) as client:
        close_run(client, run)


async def reopen(house: Any, run: str, trainer: Any, words: Words) -> None:
    with connect(house.url) as client:
        reopen_run(client, run)


async def pause(house: Any, run: str, trainer: Any, words: Words) -> None:
    with connect(house.url) as client:
        pause_run(client, run)


async def resume(house: Any, run: str, trainer: Any, words: Words) -> None:
    with connect(house.url) as client:
        resume_run(client, run)


async def revise(house: Any, run: str, trainer: Any, words: Words) -> None:
    with connect(house.url) as client:
        config = read_revisions(client, run).last.config
        revise_config(client, run, dataclasses.replace(config, batch_groups=4), from_step=1)


async def observe(house: Any, run: str, trainer: Any, words: Words) -> None:
    async with connect_async(house.url) as client:
        await declare_observer(client, run, observer="o", first_step=1, expiry_s=0.3)


async def start(house: Any, run: str, trainer: Any, words: Words) -> None:
    await trainer.start()


async def get_a_batch(house: Any, run: str, trainer: Any, words: Words) -> None:
    await house.publish(run, group("g0"), group("g1"))
    await trainer.start()
    words["pulled"] = await trainer.get(1)


async def step(house: Any, run: str, trainer: Any, words: Words) -> None:
    words["token"] = await trainer.stepped(words["pulled"])


async def step_a_batch(house: Any, run: str, trainer: Any, words: Words) -> None:
    await get_a_batch(house, run, trainer, words)
    await step(house, run, trainer, words)


async def commit(house: Any, run: str, trainer: Any, words: Words) -> None:
    await trainer.committed(words["token"])


async def announce(house: Any, run: str, trainer: Any, words: Words) -> None:
    await trainer.announce_version(1, step=0)


async def replan(house: Any, run: str, trainer: Any, words: Words) -> None:
    with connect(house.url) as client:
        request_replan(client, run, step=1)


class Work(NamedTuple):
    """A kind of work that wakes a parked run.

    Attributes:
        prepare: runs before the run is parked.
        act: gives the run work.
    """

    prepare: Callable[[Any, str, Any, Words], Awaitable[None]]
    act: Callable[[Any, str, Any, Words], Awaitable[None]]


KINDS = {
    "open_group": Work(nothing, open_group),
    "open_another_sample": Work(open_part_of_a_group, open_the_rest),
    "evaluate": Work(nothing, evaluate),
    "add_prompts": Work(nothing, give_prompts),
    "next_task": Work(give_prompts, take_task),
    "close": Work(nothing, close),
    "reopen": Work(close, reopen),
    "pause": Work(nothing, pause),
    "resume": Work(pause, resume),
    "revise": Work(nothing, revise),
    "observe": Work(nothing, observe),
    "start_session": Work(nothing, start),
    "announce_version": Work(start, announce),
    "stepped": Work(get_a_batch, step),
    "committed": Work(step_a_batch, commit),
    "request_replan": Work(get_a_batch, replan),
}


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_parked_run_is_led_again_for_every_kind_of_work(
    house: Any, kind: str, num_replicas: int
) -> None:
    run, work, words = house.create_run(), KINDS[kind], {}
    first = await house.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
    last = first
    trainer = house.trainer(first, run)
    await work.prepare(house, run, trainer, words)
    epoch = await until_parked(house, run)
    if num_replicas == 2:
        last = await house.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
        if kind != "reopen":  # a replica that starts takes no part in a finished run
            await until_led(house, run, after=epoch)
            epoch = await until_parked(house, run)
        await trainer.move_to(last)
        await first.stop()

    await work.act(house, run, trainer, words)

    await until_led(house, run, after=epoch)


async def test_parked_run_has_no_reason_that_names_its_planner(house: Any) -> None:
    run = house.create_run()
    batcher = await house.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
    await until_parked(house, run)
    with connect(house.url) as client:
        while_parked = [*no_planner(client, run)]
        await batcher.stop()

        open_silently(house, run)

        assert while_parked == []
        assert [*no_planner(client, run)] == [WaitKind.NO_PLANNER] * 2


def no_planner(client: Any, run: str) -> Iterator[str]:
    """The reasons that say so, for an operator and for a generator."""
    waits = read_waits(client, run)
    assert waits is not None
    for reason in (*reasons(read_snapshot(client, run)), *reasons(waits)):
        if reason.kind == WaitKind.NO_PLANNER:
            yield str(reason.kind)


async def test_wait_for_a_parked_run_ends_when_the_store_restarts(house: Any, server: Any) -> None:
    run = house.create_run()
    trainer = house.trainer(
        await house.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S), run
    )
    await trainer.start()
    await until_parked(house, run)

    before = num_reads(house)
    getting = asyncio.create_task(trainer.get(1, wait_s=40))
    await until("a Get that waits", lambda: num_reads(house) > before)
    await asyncio.to_thread(server.restart)

    with pytest.raises(NotReadyError, match="restarted"):
        await getting


def num_reads(house: Any) -> int:
    """How often the frontier of a run was read."""
    with connect(house.url) as client:
        found: Any = client.info("commandstats")
    return found["cmdstat_hgetall"]["calls"]


async def test_planner_of_a_parked_run_ends_when_the_run_is_lost(
    house: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    defaults = RunDiscovery.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "list_every_s", 0.2)
    run = house.create_run()
    await house.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
    await until_parked(house, run)

    with connect(house.url) as client:
        client.flushall()

    await until("the end of the planner", lambda: f"{run} is gone from the store" in caplog.text)


def open_silently(house: Any, run: str, *, sample: int = 0) -> None:
    """Open a sample of a group for a writer that sends no heartbeat."""
    num_samples = sample + 1
    record = encode_event(GroupOpened(group_id="g0", prompt_uid="", num_samples=num_samples))
    words = ("g0", num_samples, "silent", record, f"g0/{sample}/0")
    with connect(house.url) as client:
        run_command(
            client,
            script("open_group")(keys.run_keys(run).of_open_group, *words),
        )


async def test_deadline_that_is_set_in_a_parked_run_fires_on_time(house: Any) -> None:
    run = house.create_run(lease_s=60.0, group_deadline_s=0.4, reward_deadline_s=100)
    await house.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
    await until_parked(house, run)
    names = keys.run_keys(run)

    with connect(house.url) as client:
        parked_ms = int(client.hget(names.clock, "ms") or 0)
        open_silently(house, run)
        due_ms = client.zscore(names.deadlines, "group:g0")

    assert due_ms == parked_ms + 400
    await until("the deadline", lambda: has_event(house, run, DeadlineFired))


# ------------------------------------------------------------------------- runs that stay led


async def test_run_with_something_that_can_expire_is_not_parked(house: Any) -> None:
    observed, held, empty = house.create_run(), house.create_run(), house.create_run()
    async with connect_async(house.url) as client:
        await declare_observer(client, observed, observer="o", first_step=1, expiry_s=600)
    open_silently(house, held)

    await house.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
    for _ in range(3):
        await until_led(house, empty, after=await until_parked(house, empty) - 1)
        await pause(house, empty, None, {})
        await resume(house, empty, None, {})

    assert [b"parked" in leader(house, run) for run in (observed, held)] == [False, False]


async def test_damaged_stream_of_a_parked_run_does_not_stop_the_others(house: Any) -> None:
    # One read watches all runs: an error of one stream would leave all of them unwatched.
    damaged, run = house.create_run(), house.create_run(batch_groups=1)
    await house.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
    for each in (damaged, run):
        await until_parked(house, each)

    with connect(house.url) as client:
        client.delete(keys.run_keys(damaged).wake)
        client.set(keys.run_keys(damaged).wake, "no stream")
        await until_parked(house, house.create_run())
        await house.publish(run, group("g0"))

        await until("a batch", lambda: read_frontier(client, run).planned == 1)
        client.delete(keys.run_keys(damaged).wake)


async def test_run_that_is_parked_after_another_is_watched_at_once(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The read that was under way did not know the run that was parked last.
    monkeypatch.setattr(parking, "MAX_BLOCK_S", 25.0)
    await house.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
    await until_parked(house, house.create_run())
    run = house.create_run()
    epoch = await until_parked(house, run)

    await pause(house, run, None, {})

    async def is_led() -> bool:
        return int(leader(house, run)[b"epoch"]) > epoch

    await wait_until_async(is_led, timeout_s=12, describe="a leader")
