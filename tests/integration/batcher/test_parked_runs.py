"""Idle runs are parked at no cost, also in processes, and every kind of work wakes them."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import group, ids, wait_until_async
from turnstream.errors import NotReadyError, WaitKind
from turnstream.generator import Publisher
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.store.run.configs import read_revisions, revise_config
from turnstream.store.run.runs import close_run, pause_run, reopen_run, resume_run
from turnstream.store.run.tasks import Prompt, add_prompts
from turnstream.store.waits.read_waits import read_waits
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import DeadlineFired, Event, Group, Purpose
from turnstream_server.batcher.planner import listener
from turnstream_server.batcher.serving.registry import RunDiscovery
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.planning.announcements import request_replan
from turnstream_server.ledger.queries.run_snapshot import read_snapshot
from turnstream_server.ledger.sessions.observers import declare_observer

LEASE_S = 0.5
PARK_AFTER_S = 0.1
Words = dict[str, Any]
"""Values that pass from the preparation of a run to its work."""
Act = Callable[[Any, str, Any, Words], Awaitable[None]]
"""Is called with the cluster, the run, its trainer, and words."""


def leader(cluster: Any, run: str) -> dict[bytes, bytes]:
    return cluster.client.hgetall(keys.run_keys(run).leader)


async def until(what: str, condition: Callable[[], object]) -> None:
    await wait_until_async(lambda: bool(condition()), describe=what)


async def until_parked(cluster: Any, run: str) -> int:
    """The epoch of the leader that has parked the run."""
    await until("a parked run", lambda: b"parked" in leader(cluster, run))
    return int(leader(cluster, run)[b"epoch"])


async def until_led(cluster: Any, run: str, *, after: int) -> None:
    """Wait until another term has started; it may be finished already."""
    await until("a leader", lambda: int(leader(cluster, run).get(b"epoch", 0)) > after)


def has_event(cluster: Any, run: str, kind: type[Event]) -> bool:
    found: Any = cluster.client.xrange(keys.run_keys(run).events)
    return any(isinstance(decode_event(fields[b"r"]), kind) for _, fields in found)


def store_call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Act:
    """Return a kind of work: a call of the store with the client and the run."""

    async def act(cluster: Any, run: str, trainer: Any, words: Words) -> None:
        function(cluster.client, run, *arguments, **options)

    return act


def in_thread(work: Callable[[Publisher], Any]) -> Act:
    async def act(cluster: Any, run: str, trainer: Any, words: Words) -> None:
        def send() -> None:
            with Publisher(cluster.url, run) as publisher:
                work(publisher)

        await asyncio.to_thread(send)

    return act


def publish(*groups: Group) -> Act:
    async def act(cluster: Any, run: str, trainer: Any, words: Words) -> None:
        await cluster.publish(run, *groups)

    return act


async def nothing(cluster: Any, run: str, trainer: Any, words: Words) -> None:
    """An empty run needs no preparation."""


def seal_one_of_two(publisher: Publisher) -> None:
    """Leave an open group without a lease."""
    trajectory = publisher.trajectory("g0", 0, num_samples=2)
    trajectory.append(ids("ab"), ids("c"))
    trajectory.seal(1.0)


async def open_the_rest(cluster: Any, run: str, trainer: Any, words: Words) -> None:
    """Open the other sample, which adds a lease and no event."""
    cluster.open_group(run, "g0", "g0/1/0", num_samples=2)


def take_task(publisher: Publisher) -> None:
    publisher.next_task(10).trajectories[0].append(ids("ab"), ids("c")).result(10)


def revise(client: Any, run: str) -> None:
    config = read_revisions(client, run).last.config
    revise_config(client, run, dataclasses.replace(config, batch_groups=4), from_step=1)


async def observe(cluster: Any, run: str, trainer: Any, words: Words) -> None:
    async with connect_async(cluster.url) as client:
        await declare_observer(client, run, observer="o", first_step=1, expiry_s=0.3)


async def start(cluster: Any, run: str, trainer: Any, words: Words) -> None:
    await trainer.start()


async def get_a_batch(cluster: Any, run: str, trainer: Any, words: Words) -> None:
    await cluster.publish(run, group("g0"), group("g1"))
    await trainer.start()
    words["pulled"] = await trainer.get(1)


async def step(cluster: Any, run: str, trainer: Any, words: Words) -> None:
    words["token"] = await trainer.stepped(words["pulled"])


async def step_a_batch(cluster: Any, run: str, trainer: Any, words: Words) -> None:
    await get_a_batch(cluster, run, trainer, words)
    await step(cluster, run, trainer, words)


async def commit(cluster: Any, run: str, trainer: Any, words: Words) -> None:
    await trainer.committed(words["token"])


async def announce(cluster: Any, run: str, trainer: Any, words: Words) -> None:
    await trainer.announce_version(1, step=0)


PROMPTS = [Prompt(prompt_uid="p0", payload=b"", num_samples=1)]
KINDS: dict[str, tuple[Act, Act]] = {
    "open_group": (nothing, publish(group("g0"))),
    "open_another_sample": (in_thread(seal_one_of_two), open_the_rest),
    "evaluate": (nothing, publish(dataclasses.replace(group("e0"), purpose=Purpose.EVAL))),
    "add_prompts": (nothing, store_call(add_prompts, PROMPTS)),
    "next_task": (store_call(add_prompts, PROMPTS), in_thread(take_task)),
    "close": (nothing, store_call(close_run)),
    "reopen": (store_call(close_run), store_call(reopen_run)),
    "pause": (nothing, store_call(pause_run)),
    "resume": (store_call(pause_run), store_call(resume_run)),
    "revise": (nothing, store_call(revise)),
    "observe": (nothing, observe),
    "start_session": (nothing, start),
    "announce_version": (start, announce),
    "stepped": (get_a_batch, step),
    "committed": (step_a_batch, commit),
    "request_replan": (get_a_batch, store_call(request_replan)),
}
"""The preparation of a run before it is parked, and the work that wakes it."""


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_parked_run_is_led_again_for_every_kind_of_work(
    cluster: Any, num_replicas: int
) -> None:
    replica = await cluster.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
    runs: dict[str, str] = {kind: cluster.create_run() for kind in KINDS}
    calls = {kind: (cluster, run, cluster.trainer(replica, run), {}) for kind, run in runs.items()}
    await asyncio.gather(*(KINDS[kind][0](*call) for kind, call in calls.items()))
    epochs = {kind: await until_parked(cluster, run) for kind, run in runs.items()}
    if num_replicas == 2:
        last = await cluster.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
        del epochs["reopen"]  # a replica that starts takes no part in a finished run
        for kind, epoch in epochs.items():
            await until_led(cluster, runs[kind], after=epoch)
        for _, _, trainer, _ in calls.values():
            await trainer.move_to(last.address)
        await replica.stop()

    for kind, run in runs.items():
        epoch = await until_parked(cluster, run)
        await KINDS[kind][1](*calls[kind])
        try:
            await until_led(cluster, run, after=epoch)
        except TimeoutError as error:
            error.add_note(kind)
            raise


async def test_parked_run_has_no_reason_that_names_its_planner(cluster: Any) -> None:
    run = cluster.create_run()
    batcher = await cluster.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
    await until_parked(cluster, run)
    while_parked = [*no_planner(cluster.client, run)]
    await batcher.stop()

    cluster.open_group(run, "g0", "g0/0/0")

    assert while_parked == []
    assert [*no_planner(cluster.client, run)] == [WaitKind.BATCHER_AWAY] * 2


def no_planner(client: Any, run: str) -> Iterator[str]:
    """The reasons that say so, for an operator and for a generator."""
    waits = read_waits(client, run)
    assert waits is not None
    for reason in (*reasons(read_snapshot(client, run)), *reasons(waits)):
        if reason.kind == WaitKind.BATCHER_AWAY:
            yield str(reason.kind)


async def test_wait_for_a_parked_run_ends_when_the_store_restarts(
    cluster: Any, server: Any
) -> None:
    run = cluster.create_run()
    trainer = cluster.trainer(
        await cluster.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S), run
    )
    await trainer.start()
    await until_parked(cluster, run)

    before = num_reads(cluster)
    getting = asyncio.create_task(trainer.get(1, wait_s=40))
    await until("a Get that waits", lambda: num_reads(cluster) > before)
    await asyncio.to_thread(server.restart)

    with pytest.raises(NotReadyError, match="restarted"):
        await getting


def num_reads(cluster: Any) -> int:
    found: Any = cluster.client.info("commandstats")
    return found["cmdstat_hgetall"]["calls"]


async def test_planner_of_a_parked_run_ends_when_the_run_is_lost(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    defaults = RunDiscovery.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "list_every_s", 0.2)
    run = cluster.create_run()
    await cluster.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
    await until_parked(cluster, run)

    cluster.client.flushall()

    await until("the end of the planner", lambda: f"{run} is gone from the store" in caplog.text)


async def test_deadline_that_is_set_in_a_parked_run_fires_on_time(cluster: Any) -> None:
    run = cluster.create_run(lease_s=60.0, group_deadline_s=0.4, reward_deadline_s=100)
    await cluster.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
    await until_parked(cluster, run)
    names = keys.run_keys(run)

    parked_ms = int(cluster.client.hget(names.clock, "ms") or 0)
    cluster.open_group(run, "g0", "g0/0/0")
    due_ms = cluster.client.zscore(names.deadlines, "group:g0")

    assert due_ms == parked_ms + 400
    await until("the deadline", lambda: has_event(cluster, run, DeadlineFired))


async def test_damaged_stream_of_a_parked_run_does_not_stop_the_others(cluster: Any) -> None:
    # One read watches all runs: an error of one stream would leave all of them unwatched.
    damaged, run = cluster.create_run(), cluster.create_run(batch_groups=1)
    await cluster.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
    for each in (damaged, run):
        await until_parked(cluster, each)

    cluster.client.delete(keys.run_keys(damaged).wake)
    cluster.client.set(keys.run_keys(damaged).wake, "no stream")
    await until_parked(cluster, cluster.create_run())
    await cluster.publish(run, group("g0"))

    await until("a batch", lambda: read_frontier(cluster.client, run).planned == 1)
    cluster.client.delete(keys.run_keys(damaged).wake)


async def test_run_that_is_parked_after_another_is_watched_at_once(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The read that was under way did not know the run that was parked last.
    monkeypatch.setattr(listener, "MAX_BLOCK_S", 25.0)
    await cluster.start_batcher(lease_s=LEASE_S, park_after_s=PARK_AFTER_S)
    await until_parked(cluster, cluster.create_run())
    run = cluster.create_run()
    epoch = await until_parked(cluster, run)

    pause_run(cluster.client, run)

    await wait_until_async(
        lambda: int(leader(cluster, run)[b"epoch"]) > epoch, timeout_s=12, describe="a leader"
    )


WINDOW_S = 4.0
OPTIONS = {"leader_lease_s": 2.0, "park_after_s": 0.3}


async def started(start_batcher_process: Any, failpoint: str = "") -> Any:
    process = start_batcher_process(failpoint, **OPTIONS)
    assert await process.line()
    return process


def num_operations(cluster: Any) -> int:
    found: Any = cluster.client.info("stats")
    return found["total_commands_processed"]


def cpu_s(process: Any) -> float:
    return time.clock_gettime((~process.pid << 3) | 2)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the CPU clock of a process")
@pytest.mark.parametrize(
    ("num_replicas", "num_runs"), [pytest.param(1, 200, marks=pytest.mark.campaign), (2, 50)]
)
async def test_idle_and_closed_runs_cost_no_polling(
    cluster: Any, start_batcher_process: Any, num_replicas: int, num_runs: int
) -> None:
    runs = [cluster.create_run(batch_groups=1) for _ in range(2 * num_runs)]
    for run in runs[num_runs:]:
        close_run(cluster.client, run)
    processes = [await started(start_batcher_process) for _ in range(num_replicas)]
    open_runs = runs[:num_runs] if num_replicas > 1 else runs
    leaders = [keys.run_keys(run).leader for run in open_runs]
    await wait_until_async(
        lambda: all(cluster.client.hexists(leader, "parked") for leader in leaders),
        120,
        describe="parked runs",
    )
    await wait_until_async(lambda: is_quiet(cluster), 120, describe="a quiet store")

    commands, used_s = num_operations(cluster), [cpu_s(each) for each in processes]
    await asyncio.sleep(WINDOW_S)

    assert num_operations(cluster) - commands < 50 * num_replicas
    for process, before_s in zip(processes, used_s, strict=True):
        assert cpu_s(process) - before_s < WINDOW_S / 20


async def is_quiet(cluster: Any) -> bool:
    before = num_operations(cluster)
    await asyncio.sleep(1)
    return num_operations(cluster) - before < 20


@pytest.mark.parametrize("place", ["park.before", "park.after"])
async def test_work_that_arrives_while_a_run_is_parked_is_done(
    cluster: Any, start_batcher_process: Any, place: str
) -> None:
    run = cluster.create_run(batch_groups=1)
    process = await started(start_batcher_process, f"{place}=stop")
    stat = Path(f"/proc/{process.pid}/stat")
    await wait_until_async(
        lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", describe=place
    )

    await cluster.publish(run, group("g0"))
    process.send_signal(signal.SIGCONT)

    await cluster.planned(run, 1)
