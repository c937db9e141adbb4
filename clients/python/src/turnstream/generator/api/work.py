"""Work for a generator: prompts, and samples to be tried again, opened under its leases."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar

from turnstream.errors import (
    ConflictError,
    EndOfRunError,
    NotReadyError,
    PromptsExhaustedError,
    UnavailableError,
)
from turnstream.generator.api.trajectory_writers import TrajectoryWriterBase, reason_of
from turnstream.generator.requests import AwaitWake, NextTask, open_task
from turnstream.generator.transport.transport import BoundedCalls
from turnstream.store.run.tasks import (
    NoTask,
    OfferedTask,
    Refill,
    TakenTask,
    parse_offer,
    parse_task,
    tasks_to_pass,
)
from turnstream.store.waits.awaited import no_refill, no_task
from turnstream.types import TrajectoryKey

_T = TypeVar("_T")
_AnyWriter = TypeVar("_AnyWriter", bound=TrajectoryWriterBase[Any, Any])


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
                trajectory.abandon(reason_of(error))


class Task(_Task[_AnyWriter]):
    """A prompt to be sampled, or one sample of it to be tried again; a context manager.

    Made by `Publisher.next_task`, whose leases it holds from then on. Leaving it abandons the
    unsealed trajectories, so that the group can end and the prompt is granted again.

    Attributes:
        group_id: name of the group.
        prompt_uid: the dataset's name of the prompt.
        payload: bytes of the prompt; empty for a run without prompts, where a refill is taken.
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


class WorkQueue:
    """Takes tasks and refills of a run for one writer, in one event loop.

    Args:
        writer: name of the writer.
        is_exclusive: another queue may have the same writer. A task goes to one of them; it is lost
            until its lease ends if the answer of the store is lost.
    """

    def __init__(self, writer: str, *, is_exclusive: bool = False) -> None:
        self._writer = writer
        self._is_exclusive = is_exclusive
        self._taken_refills: set[TrajectoryKey] = set()
        self._unanswered: list[OfferedTask] = []

    async def next_refill(self, run: str, calls: BoundedCalls) -> Refill:
        """Open an attempt that was granted, as soon as there is one; one caller of several wins."""
        found = await self._take(run, calls, self._accept_refill, refills_only=True)
        if isinstance(found, NoTask):
            facts = await calls.read_waits(run)
            raise NotReadyError(calls.wait.message, no_refill(facts, waited_s=calls.wait.wait_s))
        return found

    def _accept_refill(self, taken: TakenTask) -> Refill | None:
        """Return the attempt; None if another call of this writer has taken it."""
        (key,) = taken.epochs
        if key in self._taken_refills:
            return None
        self._taken_refills.add(key)
        return Refill(key=key, group=taken.task.group)

    async def next_task(
        self, run: str, calls: BoundedCalls, *, adopt: Callable[[TakenTask], list[_T]]
    ) -> tuple[OfferedTask, list[_T]]:
        """Take the next task, as soon as there is one, with the writers of its trajectories.

        `adopt` returns these writers; none if this publisher writes the task already.
        """

        def accept(taken: TakenTask) -> tuple[OfferedTask, list[_T]] | None:
            trajectories = adopt(taken)
            return (taken.task, trajectories) if trajectories else None

        found = await self._take(run, calls, accept, refills_only=False)
        if not isinstance(found, NoTask):
            return found
        if found.is_exhausted:
            raise PromptsExhaustedError(f"run {run!r}: {found.why}")
        facts = await calls.read_waits(run)
        reasons = no_task(found.why, facts, waited_s=calls.wait.wait_s)
        raise NotReadyError(f"{calls.wait.message}: {found.why}", reasons)

    async def _take(
        self,
        run: str,
        calls: BoundedCalls,
        accept: Callable[[TakenTask], _T | None],
        *,
        refills_only: bool,
    ) -> _T | NoTask:
        """Return the first accepted task, or why there was none before the deadline."""
        num_lost = 0
        while True:
            passed = tasks_to_pass(random.random(), num_lost=num_lost)  # noqa: S311
            offer = NextTask(run, refills_only=refills_only, num_passed=passed)
            found = await self._open_next(calls, offer)
            if isinstance(found, TakenTask):
                if found.epochs and (accepted := accept(found)) is not None:
                    return accepted
                num_lost += 1  # another writer opened it first, or it is written here already
                continue
            num_lost = 0
            calls.wait.note_answer(found.why)
            if calls.wait.has_timed_out:
                return found
            await calls.reply(AwaitWake(run, found.wake_id, calls.wait.block_ms))

    async def _open_next(self, calls: BoundedCalls, offer: NextTask) -> TakenTask | NoTask:
        """Open the offered task; first one whose opening had no answer, since it may be open."""
        task = self._pop_unanswered(refills_only=offer.refills_only)
        is_fresh = task is None
        if task is None:
            found = parse_offer(await calls.reply(offer))
            if isinstance(found, NoTask):
                return found
            task = found
        try:
            opening = open_task(
                offer.run, task, writer=self._writer, is_exclusive=self._is_exclusive
            )
            reply = await calls.reply(opening)
        except (ConflictError, EndOfRunError) as error:
            if is_fresh and isinstance(error, ConflictError):
                raise
            # The offer is out of date: its group has finished, or the run was closed since. The
            # next offer raises the end of a run that has no refill left.
            return TakenTask(task=task, epochs={})
        except BaseException as error:
            if isinstance(error, UnavailableError) or not isinstance(error, Exception):
                self._unanswered.append(task)
            raise
        return parse_task(task, reply)

    def _pop_unanswered(self, *, refills_only: bool) -> OfferedTask | None:
        for task in reversed(self._unanswered):
            if task.is_refill or not refills_only:
                self._unanswered.remove(task)
                return task
        return None
