"""Tasks: refills and prompts that a run grants to a generator, leased until they are written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Self, TypeVar

from turnstream.errors import (
    NotReadyError,
    PromptsExhaustedError,
    TurnstreamError,
    UnavailableError,
)
from turnstream.generator.api import writers
from turnstream.generator.api.reopening import AnyTrajectoryWriter
from turnstream.generator.transport.steps import ReadWaits, Steps, until_woken
from turnstream.store.run.tasks import (
    NoTask,
    OfferedTask,
    TakenTask,
    next_task_command,
    open_task_command,
    parse_offer,
    parse_task,
)
from turnstream.store.waits.awaited import no_task
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.store.waits.wait_snapshot import WaitSnapshot

_AnyWriter = TypeVar("_AnyWriter", bound=AnyTrajectoryWriter)


class _Task(Generic[_AnyWriter]):
    """The common base of both kinds of tasks."""

    def __init__(self, task: OfferedTask, trajectories: Sequence[_AnyWriter]) -> None:
        self.group_id = task.group.group_id
        self.prompt_uid = task.group.prompt_uid
        self.payload = task.payload
        self.num_samples = task.group.num_samples
        self.num_needed = task.group.num_needed
        self.trajectories = tuple(trajectories)

    def _abandon_unsealed(self, error: BaseException | None) -> None:
        for trajectory in self.trajectories:
            if not trajectory.has_ended:
                trajectory.abandon(writers.reason_of(error))


class Task(_Task[_AnyWriter]):
    """A prompt to be sampled, or one sample of it to be tried again; a context manager.

    Made by `Publisher.next_task`, whose leases it holds from then on. Leaving it abandons what was
    not sealed, so that the group can end and the prompt is given out again.

    Attributes:
        group_id: name of the group.
        prompt_uid: the dataset's name of the prompt.
        payload: bytes of the prompt; empty where the run was not given it, and a refill is taken.
        num_samples: number of samples of the group.
        num_needed: members that decide the group.
        trajectories: their writers, open already: all samples of a new group, one of a refill.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._abandon_unsealed(error)


class AsyncTask(_Task[_AnyWriter]):
    """The same as `Task`, made by `AsyncPublisher.next_task`; an asynchronous context manager."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._abandon_unsealed(error)


def take_task(
    run: str,
    *,
    writer: str,
    adopt: Callable[[TakenTask], list[_AnyWriter]],
    wait: StoreWait,
    unanswered: deque[OfferedTask],
) -> Steps[tuple[OfferedTask, list[_AnyWriter]]]:
    """Take the next task of a run, as soon as there is one, with the writers of its trajectories.

    Args:
        run: name of the run.
        writer: the writer that takes it.
        adopt: return the writers of a task; none if this publisher writes it already.
        wait: deadline of the call.
        unanswered: tasks that this writer asked to open without an answer; calls for this writer
            share it.

    Raises:
        NotReadyError: there was none before the deadline, and why.
        PromptsExhaustedError: every prompt of the run was done by then.
        EndOfRunError: the run is closed.
    """
    while True:
        found = yield from _next_task(run, writer=writer, unanswered=unanswered)
        if isinstance(found, TakenTask):
            if found.epochs and (trajectories := adopt(found)):
                return found.task, trajectories
            continue  # another writer opened it first, or it is written here already
        wait.told(found.why)
        if wait.is_over:
            facts = None if found.is_exhausted else (yield ReadWaits(run))
            raise _none_came(run, found, wait, facts)
        yield until_woken(run, found.wake_id, wait)


def _next_task(
    run: str, *, writer: str, unanswered: deque[OfferedTask]
) -> Steps[TakenTask | NoTask]:
    """Open the next task; first the one that may be open since a call without an answer."""
    try:
        task = unanswered.pop()  # atomic: threads share it
    except IndexError:
        found = parse_offer((yield next_task_command(run)))
        if isinstance(found, NoTask):
            return found
        task = found
    try:
        reply = yield open_task_command(run, task, writer=writer)
    except BaseException as error:
        if isinstance(error, UnavailableError) or not isinstance(error, Exception):
            unanswered.append(task)
        raise
    return parse_task(task, reply)


def _none_came(
    run: str, found: NoTask, wait: StoreWait, waits: WaitSnapshot | None
) -> TurnstreamError:
    if found.is_exhausted:
        return PromptsExhaustedError(f"run {run!r}: {found.why}")
    reasons = no_task(found.why, waits, waited_s=wait.wait_s)
    return NotReadyError(f"{wait.message}: {found.why}", reasons)
