"""Tasks: what a run gives a generator to do, a refill or a prompt, leased until it is written."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, Self, TypeVar

import redis
import redis.asyncio

from turnstream.errors import (
    NotReadyError,
    PromptsExhaustedError,
    TurnstreamError,
    UnavailableError,
    WaitKind,
)
from turnstream.generator import writers
from turnstream.store import keys
from turnstream.store.asking import StoreWait
from turnstream.store.tasks import NoTask, TakenTask, next_task, next_task_async
from turnstream.store.wait_reasons import no_task
from turnstream.store.waits import WaitFacts


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


def wait_for_task(
    client: redis.Redis | redis.asyncio.Redis,
    run: str,
    *,
    wait_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> StoreWait:
    """The wait of a call that takes a task; see StoreWait."""
    return StoreWait(client, WaitKind.NO_TASK, f"run {run!r}: no task", wait_s=wait_s, clock=clock)


def take_task(
    client: redis.Redis,
    run: str,
    *,
    writer: str,
    adopt: Callable[[TakenTask], list[_AnyWriter]],
    wait_s: float,
    unanswered: deque[str],
) -> Task[_AnyWriter]:
    """The next task of a run, as soon as there is one.

    Args:
        client: of the store.
        run: name of the run.
        writer: who takes it.
        adopt: begins to write what was given; nothing, where that is written here already.
        wait_s: how long to wait.
        unanswered: requests of this writer that the store has not answered, and may have granted;
            calls for this writer share it.

    Raises:
        NotReadyError: there was none within `wait_s`, and why.
        PromptsExhaustedError: every prompt of the run was done by then.
        EndOfRunError: the run is closed.
        StoreUnavailableError: the store cannot be reached, or did not answer by then.
    """
    wait = wait_for_task(client, run, wait_s=wait_s)
    while True:
        with _request(unanswered) as request, wait.asking():
            found = next_task(client, run, writer=writer, request=request)
        if isinstance(found, TakenTask):
            if found.epochs and (trajectories := adopt(found)):
                return Task(found, trajectories)
            continue  # it came late, and was given up meanwhile; or it was given before
        wait.told(found.why)
        if wait.is_over:
            waits = None if found.is_exhausted else wait.look(client, run)
            raise _none_came(run, found, wait, waits)
        with wait.asking():
            client.xread({keys.run_keys(run).wake: found.wake_id}, block=wait.block_ms)


async def take_task_async(
    client: redis.asyncio.Redis,
    run: str,
    *,
    writer: str,
    adopt: Callable[[TakenTask], list[_AnyWriter]],
    wait_s: float,
    unanswered: deque[str],
) -> AsyncTask[_AnyWriter]:
    """The same as `take_task`, for asyncio."""
    clock = asyncio.get_running_loop().time
    wait = wait_for_task(client, run, wait_s=wait_s, clock=clock)
    while True:
        with _request(unanswered) as request:
            async with wait.asking_async():
                found = await next_task_async(client, run, writer=writer, request=request)
        if isinstance(found, TakenTask):
            if found.epochs and (trajectories := adopt(found)):
                return AsyncTask(found, trajectories)
            continue  # it came late, and was given up meanwhile; or it was given before
        wait.told(found.why)
        if wait.is_over:
            waits = None if found.is_exhausted else await wait.look_async(client, run)
            raise _none_came(run, found, wait, waits)
        async with wait.asking_async():
            await client.xread({keys.run_keys(run).wake: found.wake_id}, block=wait.block_ms)


def _none_came(
    run: str, found: NoTask, wait: StoreWait, waits: WaitFacts | None
) -> TurnstreamError:
    if found.is_exhausted:
        return PromptsExhaustedError(f"run {run!r}: {found.why}")
    reasons = no_task(found.why, waits, waited_s=wait.wait_s)
    return NotReadyError(f"{wait.message}: {found.why}", reasons)


@contextlib.contextmanager
def _request(unanswered: deque[str]) -> Iterator[str]:
    """A name for one request: of one that was not answered, so that what it was given is found."""
    try:
        request = unanswered.pop()  # atomic: threads share it
    except IndexError:
        request = secrets.token_hex(8)
    try:
        yield request
    except BaseException as error:
        if isinstance(error, UnavailableError) or not isinstance(error, Exception):
            unanswered.append(request)
        raise
