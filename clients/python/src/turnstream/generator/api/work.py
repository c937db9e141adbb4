"""Work for a generator: prompts, and samples to be tried again, opened under its leases."""

from __future__ import annotations

import zlib
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
from turnstream.generator.transport.store_calls import StoreCalls
from turnstream.store.run.groups import (
    Refill,
    list_refills_command,
    open_refill_command,
    parse_refills,
)
from turnstream.store.run.tasks import (
    NoTask,
    OfferedTask,
    TakenTask,
    next_task_command,
    open_task_command,
    parse_offer,
    parse_task,
)
from turnstream.store.waits.awaited import no_refill, no_task
from turnstream.types import TrajectoryKey

_MAX_LISTED = 32

_AnyWriter = TypeVar("_AnyWriter", bound=TrajectoryWriterBase[Any])


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
    """

    def __init__(self, writer: str) -> None:
        self._writer = writer
        self._tried: set[TrajectoryKey] = set()
        self._unanswered: list[OfferedTask] = []

    async def next_refill(self, run: str, calls: StoreCalls) -> Refill:
        """Open an attempt that was granted, as soon as there is one; one caller of several wins.

        The store returns an attempt again to the writer that has it. So the calls of this writer
        skip the attempts that one of them has requested.

        Raises:
            NotReadyError: there was none before the deadline.
            RunNotFoundError: no such run.
        """
        wait = calls.wait
        while True:
            listed = await calls.run(list_refills_command(run, max_count=_MAX_LISTED))
            wake_id, refills = parse_refills(listed)
            untried = self._in_turn([each for each in refills if each.key not in self._tried])
            for refill in untried:
                if await self._open_refill(run, refill, calls):
                    return refill
            wait.note_answer(_none_left(refills))
            if wait.has_timed_out:
                facts = await calls.read_waits(run)
                raise NotReadyError(wait.message, no_refill(facts, waited_s=wait.wait_s))
            if not untried:
                await calls.wait_until_woken(run, wake_id)

    async def _open_refill(self, run: str, refill: Refill, calls: StoreCalls) -> bool:
        """Open an attempt; return False if another call or another writer has it."""
        if refill.key in self._tried:
            return False
        self._tried.add(refill.key)
        try:
            answers = await calls.run(open_refill_command(run, self._writer, refill))
        except BaseException:
            self._tried.remove(refill.key)
            raise
        return isinstance(answers[0], int)  # the epoch; a text names another writer

    def _in_turn(self, refills: Sequence[Refill]) -> Sequence[Refill]:
        """Return the refills in an order that differs by writer, so that few want the same one."""
        start = zlib.crc32(self._writer.encode()) % max(len(refills), 1)
        return [*refills[start:], *refills[:start]]

    async def next_task(
        self, run: str, calls: StoreCalls, *, adopt: Callable[[TakenTask], list[_AnyWriter]]
    ) -> tuple[OfferedTask, list[_AnyWriter]]:
        """Take the next task, as soon as there is one, with the writers of its trajectories.

        Args:
            run: name of the run.
            calls: calls of the store, which have the deadline.
            adopt: return the writers of a task; none if this publisher writes it already.

        Raises:
            NotReadyError: there was none before the deadline, and why.
            PromptsExhaustedError: every prompt of the run was done by then.
            EndOfRunError: the run is closed.
        """
        wait = calls.wait
        while True:
            found = await self._open_next_task(run, calls)
            if isinstance(found, TakenTask):
                if found.epochs and (trajectories := adopt(found)):
                    return found.task, trajectories
                continue  # another writer opened it first, or it is written here already
            wait.note_answer(found.why)
            if wait.has_timed_out:
                if found.is_exhausted:
                    raise PromptsExhaustedError(f"run {run!r}: {found.why}")
                facts = await calls.read_waits(run)
                reasons = no_task(found.why, facts, waited_s=wait.wait_s)
                raise NotReadyError(f"{wait.message}: {found.why}", reasons)
            await calls.wait_until_woken(run, found.wake_id)

    async def _open_next_task(self, run: str, calls: StoreCalls) -> TakenTask | NoTask:
        """Open the next task; first one whose opening had no answer, since it may be open."""
        is_fresh = not self._unanswered
        if is_fresh:
            found = parse_offer(await calls.run(next_task_command(run)))
            if isinstance(found, NoTask):
                return found
            task = found
        else:
            task = self._unanswered.pop()
        try:
            reply = await calls.run(open_task_command(run, task, writer=self._writer))
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


def _none_left(refills: Sequence[Refill]) -> str:
    if not refills:
        return "no attempt was granted"
    return f"the {len(refills)} attempts that were granted are tried by others, or here"
