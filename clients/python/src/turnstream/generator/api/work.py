"""Work for a generator: prompts, and samples to be tried again, opened under its leases. No I/O."""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Self, TypeVar

from turnstream.errors import (
    ConflictError,
    EndOfRunError,
    NotReadyError,
    PromptsExhaustedError,
    UnavailableError,
)
from turnstream.generator.api.adoption import AnyTrajectoryWriter
from turnstream.generator.api.trajectory_core import reason_of
from turnstream.generator.transport.steps import ReadWaits, Steps, until_woken
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
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.types import TrajectoryKey

_MAX_LISTED = 32

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
    """Takes tasks and refills of a run for one writer; threads share it.

    Args:
        writer: name of the writer.
    """

    def __init__(self, writer: str) -> None:
        self._writer = writer
        self._tried: dict[TrajectoryKey, object] = {}
        self._unanswered: deque[OfferedTask] = deque()

    def next_refill(self, run: str, wait: StoreWait) -> Steps[Refill]:
        """Open an attempt that was granted, as soon as there is one; one caller of several wins.

        The store returns an attempt again to the writer that has it. So the calls of this writer
        skip the attempts that one of them has requested.

        Raises:
            NotReadyError: there was none before the deadline.
            RunNotFoundError: no such run.
        """
        while True:
            wake_id, refills = parse_refills(
                (yield list_refills_command(run, max_count=_MAX_LISTED))
            )
            untried = self._in_turn([each for each in refills if each.key not in self._tried])
            for refill in untried:
                with self._trying(refill.key) as is_ours:
                    if not is_ours:
                        continue
                    answers = yield open_refill_command(run, self._writer, refill)
                    if isinstance(answers[0], int):  # the epoch; a text names another writer
                        return refill
            wait.note_answer(_none_left(refills))
            if wait.has_timed_out:
                facts = yield ReadWaits(run)
                raise NotReadyError(wait.message, no_refill(facts, waited_s=wait.wait_s))
            if not untried:
                yield until_woken(run, wake_id, wait)

    @contextlib.contextmanager
    def _trying(self, key: TrajectoryKey) -> Iterator[bool]:
        """Whether no other call has requested this attempt; an error makes it available again."""
        own = object()
        is_ours = self._tried.setdefault(key, own) is own  # atomic: threads share it
        try:
            yield is_ours
        except BaseException:
            if is_ours:
                del self._tried[key]
            raise

    def _in_turn(self, refills: Sequence[Refill]) -> Sequence[Refill]:
        """Return the refills in an order that differs by writer, so that few want the same one."""
        start = zlib.crc32(self._writer.encode()) % max(len(refills), 1)
        return [*refills[start:], *refills[:start]]

    def next_task(
        self, run: str, wait: StoreWait, *, adopt: Callable[[TakenTask], list[_AnyWriter]]
    ) -> Steps[tuple[OfferedTask, list[_AnyWriter]]]:
        """Take the next task, as soon as there is one, with the writers of its trajectories.

        Args:
            run: name of the run.
            wait: deadline of the call.
            adopt: return the writers of a task; none if this publisher writes it already.

        Raises:
            NotReadyError: there was none before the deadline, and why.
            PromptsExhaustedError: every prompt of the run was done by then.
            EndOfRunError: the run is closed.
        """
        while True:
            found = yield from self._open_next_task(run)
            if isinstance(found, TakenTask):
                if found.epochs and (trajectories := adopt(found)):
                    return found.task, trajectories
                continue  # another writer opened it first, or it is written here already
            wait.note_answer(found.why)
            if wait.has_timed_out:
                if found.is_exhausted:
                    raise PromptsExhaustedError(f"run {run!r}: {found.why}")
                facts = yield ReadWaits(run)
                reasons = no_task(found.why, facts, waited_s=wait.wait_s)
                raise NotReadyError(f"{wait.message}: {found.why}", reasons)
            yield until_woken(run, found.wake_id, wait)

    def _open_next_task(self, run: str) -> Steps[TakenTask | NoTask]:
        """Open the next task; first one whose opening had no answer, since it may be open."""
        is_fresh = False
        try:
            task = self._unanswered.pop()  # atomic: threads share it
        except IndexError:
            is_fresh = True
            found = parse_offer((yield next_task_command(run)))
            if isinstance(found, NoTask):
                return found
            task = found
        try:
            reply = yield open_task_command(run, task, writer=self._writer)
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
