"""The faults that a long run draws from, each as a function of the running stack.

A fault without effect raises `InVainError` and is not counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

from harness.machine import asleep
from harness.proxy import Proxy
from harness.rig import LEASE_S
from harness.running import InVainError, Stack
from turnstream.errors import ConflictError
from turnstream.store.run.configs import read_revisions, revise_config
from turnstream.store.run.runs import pause_run, resume_run
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.bus.planning.manifests import read_plan
from turnstream_server.jobs.stack import Service

HOUR_S = 3600.0
CUT_S = 1.0
"""Longest wait for a reply that can be cut."""
LATE_SYNC_S = 1.5
"""Longest delay of the disk under everysec; publishers keep their writes for longer."""
IN_FORCE_S = 60.0
MOST_GROUPS = 6
"""Groups of a batch before and after a revision."""
AHEAD = 2
"""Steps between the newest plan and the first with another config, so that it is stored in time."""

Fault = Callable[[Stack], None]


def _one_of(stack: Stack, services: Iterable[Service]) -> Service:
    living = [service for service in services if service.status is None]
    if not living:
        raise InVainError("no process of this kind is alive")
    return stack.rng.choice(living)


def _sleep(stack: Stack, services: Iterable[Service], seconds: float) -> None:
    with asleep(_one_of(stack, services).pid):
        time.sleep(seconds)


def kill_a_batcher(stack: Stack) -> None:
    _one_of(stack, stack.batchers.values()).kill()


def put_a_batcher_to_sleep(stack: Stack) -> None:
    """Send SIGSTOP for twice its lease."""
    _sleep(stack, stack.batchers.values(), 2 * LEASE_S)


def kill_a_rank(stack: Stack) -> None:
    """Send SIGKILL; the other ranks end too, and a world of another size starts."""
    _one_of(stack, stack.rig.ranks).kill()


def put_a_rank_to_sleep(stack: Stack) -> None:
    _sleep(stack, stack.rig.ranks, stack.rng.uniform(0.5, 2.0))


def kill_a_generator(stack: Stack) -> None:
    _one_of(stack, stack.generators.values()).kill()


def put_a_generator_to_sleep(stack: Stack) -> None:
    _sleep(stack, stack.generators.values(), stack.rng.uniform(0.5, 2.0))


def kill_the_store(stack: Stack) -> None:
    stack.restart_store()


def cut_the_stores_power(stack: Stack) -> None:
    """Cut the append-only file to its synced part, and restart.

    Under everysec the disk is late by then. Half of the time a generator dies with its writes.
    """
    if stack.durability == "everysec":
        stack.machine.freeze_disk()
        time.sleep(stack.rng.uniform(0.0, LATE_SYNC_S))
        if stack.rng.random() < 0.5:
            with contextlib.suppress(InVainError):
                kill_a_generator(stack)
    stack.restart_store(power_off=True)


def put_the_store_to_sleep(stack: Stack) -> None:
    with asleep(stack.rig.server.pid):
        time.sleep(stack.rng.uniform(0.5, 2 * LEASE_S))


def lose_replies_of_the_store(stack: Stack) -> None:
    """Reset connections after their request has arrived."""
    _cut_replies(stack, stack.store_proxy, within_bytes=400)


def cut_all_connections_to_the_store(stack: Stack) -> None:
    stack.store_proxy.cut_all()


def silence_the_store(stack: Stack) -> None:
    """Keep connections half-open: requests arrive, replies do not, until all are reset."""
    stack.store_proxy.replies.is_silent = True
    time.sleep(stack.rng.uniform(0.5, 2.0))
    stack.store_proxy.replies.is_silent = False
    stack.store_proxy.cut_all()


def slow_the_store_down(stack: Stack) -> None:
    stack.store_proxy.replies.delay_s = stack.rng.uniform(0.01, 0.1)
    time.sleep(2.0)
    stack.store_proxy.replies.delay_s = 0.0


def cut_transfers_to_the_ranks(stack: Stack) -> None:
    """Reset connections in the middle of frames."""
    _cut_replies(stack, stack.batcher_proxy, within_bytes=4000)


def _cut_replies(stack: Stack, proxy: Proxy, *, within_bytes: int) -> None:
    before = proxy.num_breaks
    for number in range(1, 4):
        proxy.break_next_reply(after_bytes=stack.rng.randint(0, within_bytes))
        with contextlib.suppress(TimeoutError):
            stack.rig.wait(
                lambda number=number: proxy.num_breaks >= before + number,
                "a reply to cut",
                timeout_s=CUT_S,
            )
    proxy.spare_next_reply()
    if proxy.num_breaks == before:
        raise InVainError("no request came")


def fill_the_stores_memory(stack: Stack) -> None:
    memory: Any = stack.rig.client.info("memory")
    before = _num_refused(stack)
    stack.rig.client.config_set("maxmemory", memory["used_memory"])
    time.sleep(2.0)
    num_refused = _num_refused(stack) - before
    stack.rig.client.config_set("maxmemory", memory["maxmemory"])
    if not num_refused:
        raise InVainError("no write was refused")


def _num_refused(stack: Stack) -> int:
    errors: Any = stack.rig.client.info("errorstats")
    return errors.get("errorstat_OOM", {"count": 0})["count"]


def move_the_clock(stack: Stack) -> None:
    """Set the store's clock wrong by up to an hour, under everysec only forward.

    A store whose clock is set back does not sync until the clock has caught up.
    """
    if stack.durability == "everysec":
        stack.clock_s += stack.rng.uniform(0.0, HOUR_S)
    else:
        stack.clock_s = stack.rng.uniform(-HOUR_S, HOUR_S)
    stack.machine.set_clock(wrong_by_s=stack.clock_s)


def pause_the_run(stack: Stack) -> None:
    """Pause the run; no group starts and no batch is planned until it is resumed.

    Half of the time a batcher dies during the pause.
    """
    client, run = stack.rig.client, stack.rig.run
    pause_run(client, run, "a fault")
    before = read_frontier(client, run)
    time.sleep(stack.rng.uniform(0.2, 1.0))
    if stack.rng.random() < 0.5:
        stack.batchers[stack.rng.choice(list(stack.batchers))].kill()
        stack.mend_services()
    after = read_frontier(client, run)
    assert (before.paused, after.paused) == ("a fault", "a fault")
    assert (before.planned, before.num_opened_groups) == (after.planned, after.num_opened_groups)
    resume_run(client, run)


def revise_the_run(stack: Stack) -> None:
    client, run = stack.rig.client, stack.rig.run
    number, from_step = _store_revision(stack)

    def is_planned() -> bool:
        stack.mend()
        return read_frontier(client, run).planned >= from_step

    stack.rig.wait(is_planned, f"step {from_step} by revision {number}", timeout_s=IN_FORCE_S)
    revisions = read_revisions(client, run)
    assert revisions.in_force == number
    batch_groups = revisions.config(number).batch_groups
    for step in (from_step - 1, from_step):
        stored = read_plan(client, run, step)
        if stored is None:
            continue  # released meanwhile
        planned_by = stored.manifest.config_revision
        assert (planned_by == number) == (step == from_step), (step, planned_by, number)
        if step == from_step:
            assert len(stored.manifest.groups) == batch_groups


def _store_revision(stack: Stack) -> tuple[int, int]:
    """Return the number and the first step of a new config."""
    client, run = stack.rig.client, stack.rig.run
    last = read_revisions(client, run).last.config
    wanted = dataclasses.replace(
        last,
        batch_groups=MOST_GROUPS if last.batch_groups < MOST_GROUPS else 4,
        max_tokens_per_micro_batch=stack.rng.choice((64, 96, 128)),
    )
    while True:
        from_step = read_frontier(client, run).planned + 1 + AHEAD
        try:
            return revise_config(client, run, wanted, from_step=from_step), from_step
        except ConflictError:  # the step is already planned
            continue


FAULTS: tuple[Fault, ...] = (
    *(kill_a_batcher, put_a_batcher_to_sleep),
    *(kill_a_rank, put_a_rank_to_sleep),
    *(kill_a_generator, put_a_generator_to_sleep),
    *(kill_the_store, cut_the_stores_power, put_the_store_to_sleep),
    *(lose_replies_of_the_store, cut_all_connections_to_the_store),
    *(silence_the_store, slow_the_store_down, cut_transfers_to_the_ranks),
    *(fill_the_stores_memory, move_the_clock, revise_the_run, pause_the_run),
)
