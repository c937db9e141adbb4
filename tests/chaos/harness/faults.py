"""The faults that a long run draws from, each as a function of the running stack.

One that did not come about says so (`InVainError`), and is not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from harness.actions import pause_the_run, revise_the_run, shrink_the_budget
from harness.doomed import FAILPOINTS
from harness.proxy import Proxy
from harness.rig import LEASE_S
from harness.running import InVainError, Stack
from harness.sleepers import asleep
from turnstream_server.jobs.stack import Service

HOUR_S = 3600.0
CUT_S = 1.0
"""By when a reply comes that can be cut."""
BEHIND_S = 1.5
"""How far a disk may be behind under everysec; publishers keep what they sent for longer."""

Fault = Callable[[Stack], None]


def _one_of(stack: Stack, services: Iterable[Service]) -> Service:
    """One that lives.

    Raises:
        InVainError: none does.
    """
    living = [service for service in services if service.status is None]
    if not living:
        raise InVainError("nobody is there")
    return stack.rng.choice(living)


def kill_a_batcher(stack: Stack) -> None:
    """SIGKILL."""
    _one_of(stack, stack.batchers.values()).kill()


def put_a_batcher_to_sleep(stack: Stack) -> None:
    """SIGSTOP for twice its lease."""
    with asleep(_one_of(stack, stack.batchers.values()).pid):
        stack.pause(2 * LEASE_S)


def kill_a_rank(stack: Stack) -> None:
    """SIGKILL; the others go with it, and another world comes back."""
    _one_of(stack, stack.rig.ranks).kill()


def put_a_rank_to_sleep(stack: Stack) -> None:
    """SIGSTOP for a while."""
    with asleep(_one_of(stack, stack.rig.ranks).pid):
        stack.pause(stack.rng.uniform(0.5, 2.0))


def kill_a_generator(stack: Stack) -> None:
    """SIGKILL, wherever it is."""
    _one_of(stack, stack.generators.values()).kill()


def put_a_generator_to_sleep(stack: Stack) -> None:
    """SIGSTOP for a while."""
    with asleep(_one_of(stack, stack.generators.values()).pid):
        stack.pause(stack.rng.uniform(0.5, 2.0))


def kill_the_store(stack: Stack) -> None:
    """SIGKILL and restart."""
    stack.restart_store()


def cut_the_stores_power(stack: Stack) -> None:
    """The append-only file ends where it had been synced.

    Under everysec the disk had been behind for a while by then; and now and then a generator goes
    with it, which takes along what only it could send again.
    """
    if stack.durability == "everysec":
        stack.machine.freeze_disk()
        stack.pause(stack.rng.uniform(0.0, BEHIND_S))
        if stack.rng.random() < 0.5:
            with contextlib.suppress(InVainError):
                kill_a_generator(stack)
    stack.restart_store(power_off=True)


def put_the_store_to_sleep(stack: Stack) -> None:
    """SIGSTOP for longer than a lease."""
    with asleep(stack.rig.server.pid):
        stack.pause(stack.rng.uniform(0.5, 2 * LEASE_S))


def lose_replies_of_the_store(stack: Stack) -> None:
    """Connections are reset behind requests that have arrived."""
    _cut_replies(stack, stack.store, within_bytes=400)


def cut_all_connections_to_the_store(stack: Stack) -> None:
    """All at once."""
    stack.store.cut_all()


def silence_the_store(stack: Stack) -> None:
    """Half-open: requests arrive, answers never do, until the connections are reset."""
    stack.store.replies.is_silent = True
    stack.pause(stack.rng.uniform(0.5, 2.0))
    stack.store.replies.is_silent = False
    stack.store.cut_all()


def slow_the_store_down(stack: Stack) -> None:
    """Every answer is late."""
    stack.store.replies.delay_s = stack.rng.uniform(0.01, 0.1)
    stack.pause(2.0)
    stack.store.replies.delay_s = 0.0


def cut_transfers_to_the_ranks(stack: Stack) -> None:
    """In the middle of frames."""
    _cut_replies(stack, stack.door, within_bytes=4000)


def _cut_replies(stack: Stack, proxy: Proxy, *, within_bytes: int) -> None:
    """Three of them, one after the other.

    Raises:
        InVainError: none came in time.
    """
    before = proxy.replies.num_cuts
    for number in range(1, 4):
        proxy.cut_next_reply(after_bytes=stack.rng.randint(0, within_bytes))
        with contextlib.suppress(TimeoutError):
            stack.rig.wait(
                lambda number=number: proxy.replies.num_cuts >= before + number,
                "a reply to cut",
                timeout_s=CUT_S,
            )
    proxy.replies.cut_after_bytes = None
    if proxy.replies.num_cuts == before:
        raise InVainError("nobody asked for anything")


def fill_the_stores_memory(stack: Stack) -> None:
    """Writes are refused for a while.

    Raises:
        InVainError: nobody wrote anything.
    """
    memory: Any = stack.rig.client.info("memory")
    before = _num_refused(stack)
    stack.rig.client.config_set("maxmemory", memory["used_memory"])
    stack.pause(2.0)
    num_refused = _num_refused(stack) - before
    stack.rig.client.config_set("maxmemory", memory["maxmemory"])
    if not num_refused:
        raise InVainError("nothing was refused")


def _num_refused(stack: Stack) -> int:
    """How many commands the store had no memory for."""
    errors: Any = stack.rig.client.info("errorstats")
    return errors.get("errorstat_OOM", {"count": 0})["count"]


def move_the_clock(stack: Stack) -> None:
    """By up to an hour: in either direction, but under everysec only forward.

    A store whose clock is set back syncs no more until it has caught up.
    """
    if stack.durability == "everysec":
        stack.clock_s += stack.rng.uniform(0.0, HOUR_S)
    else:
        stack.clock_s = stack.rng.uniform(-HOUR_S, HOUR_S)
    stack.machine.set_clock(wrong_by_s=stack.clock_s)


FAULTS: tuple[Fault, ...] = (
    kill_a_batcher,
    put_a_batcher_to_sleep,
    kill_a_rank,
    put_a_rank_to_sleep,
    kill_a_generator,
    put_a_generator_to_sleep,
    kill_the_store,
    cut_the_stores_power,
    put_the_store_to_sleep,
    lose_replies_of_the_store,
    cut_all_connections_to_the_store,
    silence_the_store,
    slow_the_store_down,
    cut_transfers_to_the_ranks,
    fill_the_stores_memory,
    move_the_clock,
    revise_the_run,
    pause_the_run,
    shrink_the_budget,
    *FAILPOINTS,
)
