"""Tasks: what a run gives a generator to do, a refill or a prompt, leased until it is written."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Generic, Protocol, Self, TypeVar

import redis
import redis.asyncio

from turnstream.errors import NotReadyError, PromptsExhaustedError, TurnstreamError
from turnstream.generator import writers
from turnstream.generator.outbox import Outbox
from turnstream.generator.writers import WriterState
from turnstream.store import keys
from turnstream.store.connection import MAX_BLOCK_S
from turnstream.store.replies import translating
from turnstream.store.scripts import run_command, run_command_async
from turnstream.store.tasks import NoTask, TakenTask, next_task_command, parse_task
from turnstream.store.wait_reasons import no_task
from turnstream.store.waits import WaitFacts, read_waits, read_waits_async


class _Writer(Protocol):
    """A trajectory being written, by threads or in asyncio."""

    @property
    def has_ended(self) -> bool: ...

    def abandon(self, reason: str) -> object: ...


_AnyWriter = TypeVar("_AnyWriter", bound=_Writer)


class _Task(Generic[_AnyWriter]):
    """What both kinds of tasks have in common."""

    def __init__(self, taken: TakenTask, trajectories: Sequence[_AnyWriter]) -> None:
        self.group_id = taken.group.group_id
        self.prompt_uid = taken.group.prompt_uid
        self.payload = taken.payload
        self.num_samples = taken.group.num_samples
        self.num_needed = taken.group.num_needed
        self.trajectories = tuple(trajectories)

    def _give_up(self, error: BaseException | None) -> None:
        for trajectory in self.trajectories:
            if not trajectory.has_ended:
                trajectory.abandon(writers.reason_of(error))


class Task(_Task[_AnyWriter]):
    """A prompt to be sampled, or one sample of it to be tried again; a context manager.

    Made by `Publisher.next_task`, whose leases it holds from then on. Leaving it abandons what was
    not sealed, so that the group can end and the prompt is given out again.

    Attributes:
        group_id: of the group.
        prompt_uid: the dataset's name of the prompt.
        payload: of the prompt; empty where the run was not given it, and a refill is taken.
        num_samples: of the group.
        num_needed: members that decide the group.
        trajectories: their writers, open already: all samples of a new group, one of a refill.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._give_up(error)


class AsyncTask(_Task[_AnyWriter]):
    """The same as `Task`, made by `AsyncPublisher.next_task`; an asynchronous context manager."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._give_up(error)


def take_task(client: redis.Redis, run: str, *, writer: str, wait_s: float) -> TakenTask:
    """The next task of a run, as soon as there is one.

    Raises:
        NotReadyError: there was none within `wait_s`, and why.
        PromptsExhaustedError: every prompt of the run was done by then.
        EndOfRunError: the run is closed.
        StoreUnavailableError: the store cannot be reached.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        command = next_task_command(run, writer=writer, request=secrets.token_hex(8))
        found = parse_task(run_command(client, command))
        if isinstance(found, TakenTask):
            if found.epochs:
                return found
            continue  # it came late, and was given up meanwhile
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            waits = None if found.is_exhausted else read_waits(client, run)
            raise _none_came(run, found, wait_s, waits)
        with translating():
            client.xread({keys.run_keys(run).wake: found.wake_id}, block=_block_ms(left_s))


async def take_task_async(
    client: redis.asyncio.Redis, run: str, *, writer: str, wait_s: float
) -> TakenTask:
    """The same as `take_task`, for asyncio."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + wait_s
    while True:
        command = next_task_command(run, writer=writer, request=secrets.token_hex(8))
        found = parse_task(await run_command_async(client, command))
        if isinstance(found, TakenTask):
            if found.epochs:
                return found
            continue  # it came late, and was given up meanwhile
        left_s = deadline_s - loop.time()
        if left_s <= 0:
            waits = None if found.is_exhausted else await read_waits_async(client, run)
            raise _none_came(run, found, wait_s, waits)
        with translating():
            await client.xread({keys.run_keys(run).wake: found.wake_id}, block=_block_ms(left_s))


def task_states(outbox: Outbox, taken: TakenTask, now_s: float) -> list[WriterState]:
    """The trajectories of a task as ones that are open here: their leases are kept from now on."""
    lanes = outbox.adopt_opened(taken.group, taken.epochs, now_s=now_s)
    return [WriterState(outbox, taken.group, lane.key, lane) for lane in lanes]


def _none_came(run: str, found: NoTask, wait_s: float, waits: WaitFacts | None) -> TurnstreamError:
    if found.is_exhausted:
        return PromptsExhaustedError(f"run {run!r}: {found.why}")
    reasons = no_task(found.why, waits, waited_s=wait_s)
    return NotReadyError(f"run {run!r}: no task within {wait_s:g} s: {found.why}", reasons)


def _block_ms(left_s: float) -> int:
    return max(1, int(min(MAX_BLOCK_S, left_s) * 1000))
