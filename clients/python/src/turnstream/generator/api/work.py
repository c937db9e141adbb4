"""Work for a generator: prompts, and samples to be tried again, opened under its leases."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from turnstream.batching.merge.merged_extras import whole_extras
from turnstream.batching.merge.merging import turn_prompts
from turnstream.errors import (
    ConflictError,
    EndOfRunError,
    FencedError,
    NotReadyError,
    PromptsExhaustedError,
    UnavailableError,
)
from turnstream.generator.api.trajectory_core import TrajectoryWriterBase, reason_of
from turnstream.generator.encode.encoder import AdoptedTurn, TurnRecord
from turnstream.generator.requests import (
    Adopt,
    AppendTurns,
    AwaitWake,
    NextTask,
    PostedSeal,
    PostSeals,
    ReadTurns,
    open_task,
)
from turnstream.generator.transport.transport import BoundedCalls
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.store.client.replies import parse_refusal
from turnstream.store.run.groups import Unfinished, facts_of_seal, most_attempts
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
from turnstream.types import DeclaredColumn, GroupOpened, TrajectoryKey, Turn

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


_logger = logging.getLogger(__name__)

HALF_WRITTEN: Final = "left half-written by an earlier process"
_POLL_S: Final = 1.0
"""Seconds between two attempts to adopt the samples of another writer."""

_Writer = TypeVar("_Writer", bound=TrajectoryWriterBase[Any, Any])


class Adopted(NamedTuple):
    """A trajectory of this writer, its lease epoch, its group's size and its stored turns."""

    epoch: int
    num_samples: int
    turns: tuple[AdoptedTurn, ...]


async def adopt_trajectory(
    calls: BoundedCalls,
    run: str,
    *,
    writer: str,
    key: TrajectoryKey,
    declared: Sequence[DeclaredColumn] = (),
) -> Adopted:
    """Adopt a lapsed trajectory for this writer, and read its turns. See `Publisher.adopt`.

    If the writer died between the seal and its event, the seal counts from now on.
    """
    name = keys.trajectory_id(key)
    epoch, num_samples = await calls.reply(Adopt(run, writer, name))
    # An append without a record fences earlier writers.
    await calls.reply(AppendTurns(run, writer, name, epoch))
    records, now_held, is_sealed = await calls.reply(ReadTurns(run, name))
    if now_held != epoch:
        whose = f"epoch {now_held}" if now_held else "nobody"
        raise FencedError(
            f"{keys.readable_name(name)} was adopted with epoch {epoch}, and is by now that of "
            f"{whose}: only that writer may continue it"
        )
    if is_sealed:
        seal = records[-1]
        posting = PostSeals(run, writer, [PostedSeal(name, epoch, *facts_of_seal(seal), seal)])
        raise _posted(name, (await calls.reply(posting))[0].decode())
    return Adopted(epoch, num_samples, adopted_turns(records, declared))


def _posted(name: str, answer: str) -> Exception:
    """Return the error of a trajectory whose earlier seal has just been posted."""
    if answer not in ("OK", "DUPLICATE", "SURPLUS"):
        return parse_refusal(answer).error
    return ConflictError(
        f"{keys.readable_name(name)} is sealed: its writer stored the seal before it was silent"
    )


def adopted_turns(
    records: Sequence[bytes], declared: Sequence[DeclaredColumn]
) -> tuple[AdoptedTurn, ...]:
    """Return the stored turns of a trajectory; RecordError if one is damaged."""
    stored = [decode_turn(record) for record in records]
    prompts, extras = turn_prompts(stored), whole_extras(stored, declared)
    return tuple(
        AdoptedTurn(
            TurnRecord(record, turn.shape),
            Turn(
                prompt_ids=prompt_ids,
                response_ids=turn.response_ids,
                logprobs=turn.logprobs,
                loss_mask=turn.loss_mask,
                rewards=turn.rewards,
                token_weights=turn.token_weights,
                version_runs=turn.version_runs,
                extras=columns,
                anchor=turn.anchor,
                call_id=turn.call_id,
            ),
        )
        for record, turn, prompt_ids, columns in zip(records, stored, prompts, extras, strict=True)
    )


class Reopened(NamedTuple, Generic[_Writer]):
    """The unfinished samples of a group that an earlier process opened.

    Attributes:
        unopened: attempt to open, by sample.
        writers: writers of adopted samples without turns, by sample.
        halves: writers of half-written attempts. Another attempt of the sample replaces each; the
            group stays open for it until the half is abandoned.
    """

    unopened: dict[int, int]
    writers: dict[int, _Writer]
    halves: list[_Writer]


async def adopt_unfinished(
    group: GroupOpened,
    unfinished: Unfinished,
    *,
    is_written_here: Callable[[int], bool],
    adopt: Callable[[int, int], Awaitable[_Writer]],
) -> Reopened[_Writer]:
    """Adopt the open samples of a group; those that are half-written are tried again.

    A half-written sample that has all its attempts is only adopted. Leases of another writer are
    awaited. A sample is left to its writer if that renews the lease.
    """
    reopened = Reopened[_Writer](dict.fromkeys(unfinished.unopened, 0), {}, [])
    left_s = {(sample, 0): math.inf for sample in unfinished.open if not is_written_here(sample)}
    while left_s:
        for attempt, before_s in [*left_s.items()]:
            try:
                writer = await adopt(*attempt)
            except (ConflictError, FencedError) as error:
                lease_s = error.retry_after_s
                if lease_s is None or lease_s > before_s:
                    del left_s[attempt]
                    continue
                if before_s == math.inf:
                    _logger.info(
                        "group %s: sample %d belongs to another writer; its lease ends in %.0f s "
                        "unless it is renewed",
                        *(group.group_id, attempt[0], lease_s),
                    )
                left_s[attempt] = lease_s
                continue
            del left_s[attempt]
            following = _take(writer, reopened, unfinished.again, most=most_attempts(group))
            if following is not None:
                left_s[following] = math.inf
        await asyncio.sleep(min(_POLL_S, max(left_s.values(), default=0.0)))
    return reopened


def _take(
    writer: _Writer,
    reopened: Reopened[_Writer],
    again: Mapping[int, tuple[int, str]],
    *,
    most: int,
) -> tuple[int, int] | None:
    """Sort an adopted attempt into `reopened`; return the later attempt to adopt, if there is one.

    An attempt with turns is half-written: the next of at most `most` attempts starts its episode
    again.
    """
    key = writer.key
    if not writer.turns:
        reopened.writers[key.sample] = writer
        return None
    reopened.halves.append(writer)
    last, state = again.get(key.sample, (0, ""))
    if last > key.attempt and state == "open":
        return key.sample, last
    if last <= key.attempt or state == "abandoned":
        following, outcome = max(last, key.attempt) + 1, "starts again"
        if following < most:
            reopened.unopened[key.sample] = following
        else:
            outcome = f"is abandoned after {most} attempts, the most of its group"
        _logger.warning(
            "group %s: sample %d %s: an earlier process left it with %d turns, no seal",
            *(key.group_id, key.sample, outcome, len(writer.turns)),
        )
    return None
