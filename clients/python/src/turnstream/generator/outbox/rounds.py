"""The calls that writes become, their rounds, and their run. No I/O, no decisions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from redis.exceptions import ResponseError

from turnstream.errors import TurnstreamError
from turnstream.generator.outbox.trajectory_queue import Admission, TrajectoryQueue
from turnstream.generator.requests import (
    AppendTurns,
    OpenGroup,
    PostedSeal,
    PostSeals,
    ScriptRequest,
)
from turnstream.store.client.replies import Refusal, error_text, parse_refusal
from turnstream.store.client.run_ids import is_id, no_such_run
from turnstream.store.client.scripts import Command

MAX_ROUND_BYTES: Final = 1 << 20
"""Enough to hide the round trip, and small in the server's buffers."""

MAX_ROUND_TURNS: Final = 1_000
"""Turns of one call, which blocks the store."""


def _nothing() -> None:
    pass


class Call(NamedTuple):
    """A call of a round, and what follows from its reply.

    Attributes:
        accept: handles an answer, and the time.
        refuse: handles a refusal, and the time.
        put_back: queues the call again, before all others.
        is_write: a receipt waits for it.
    """

    request: ScriptRequest
    accept: Callable[[Any, float], None]
    refuse: Callable[[Refusal, float], None]
    put_back: Callable[[], None] = _nothing
    is_write: bool = True

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        return self.request.command


class Round(NamedTuple):
    """Calls that travel together; none only to see which store answers.

    Attributes:
        is_first: the first round of a connection, which asks which process of the store answers.
        is_grouped: all calls are one transaction, which a store that syncs before it answers syncs
            once.
        sought: name of the run whose id is asked for, in a round without calls; "" for none.
    """

    calls: Sequence[Call]
    is_first: bool
    is_grouped: bool = False
    sought: str = ""

    @property
    def commands(self) -> list[Command]:
        """Return the command of each call."""
        return [call.command for call in self.calls]

    @property
    def is_heartbeat(self) -> bool:
        """Whether it has no write that a receipt waits for."""
        return not any(call.is_write for call in self.calls)


class StoreProcess(NamedTuple):
    """The process of the store that a connection leads to.

    Attributes:
        name: another process has another name; "" if the store does not say it.
        syncs_each_write: it answers after it has synced; None if the store does not say it.
    """

    name: str
    syncs_each_write: bool | None


class Answers(NamedTuple):
    """The answers to a round.

    Attributes:
        values: for each call its reply, or a ResponseError.
        store: the process that has answered, if the round was the first one.
        run: id of the run that was asked for, or why it was not read; else None.
        trouble: why the store did not even take the scripts; "" where it did.
        is_aborted: the calls were one transaction, and none was carried out because of one.
    """

    values: Sequence[Any]
    store: StoreProcess | None = None
    run: str | TurnstreamError | None = None
    trouble: str = ""
    is_aborted: bool = False


class TargetRun:
    """One run, for the whole life of a publisher: a later run of the name never takes its place.

    Attributes:
        run: its id; its name until it is found.
        is_found: whether the id is known.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.is_found = is_id(run)

    @property
    def sought(self) -> str:
        """Return the name whose id is not known; "" once the run is found."""
        return "" if self.is_found else self.run

    def found(self, run: str) -> None:
        """Keep to this run from now on. Only the first call has an effect."""
        if not self.is_found:
            self.run, self.is_found = run, True

    def refusal(self, answer: ResponseError) -> Refusal:
        """Return why a call was refused; if the run is not in the store, the message names it."""
        refused = parse_refusal(error_text(answer))
        if refused.code != "NORUN":
            return refused
        return refused._replace(message=str(no_such_run(self.run)))


def opening(run: str, writer: str, admission: Admission) -> OpenGroup:
    """Return the request for the admission of a group."""
    return OpenGroup(
        run,
        writer,
        admission.group,
        admission.record,
        [queue.trajectory_id for queue in admission.queues],
        prompt_number=admission.prompt_number,
        is_again=admission.is_again,
    )


def num_sendable(queue: TrajectoryQueue) -> tuple[int, int]:
    """Return how many turns of a trajectory fit in a round, at least one, and their bytes."""
    num_turns = 0
    num_bytes = 0
    for turn, _, _ in queue.pending:
        is_full = num_bytes + len(turn.record) > MAX_ROUND_BYTES or num_turns == MAX_ROUND_TURNS
        if num_turns and is_full:
            break
        num_turns += 1
        num_bytes += len(turn.record)
    return num_turns, num_bytes


def payload(
    run: str, writer: str, queue: TrajectoryQueue, *, num_turns: int, seals: bool
) -> AppendTurns:
    """Return the request that stores the first waiting turns, and the seal if `seals`."""
    records = [sent.turn.record for sent in itertools.islice(queue.pending, num_turns)]
    if seals:
        records.append(queue.seal_record)
    return AppendTurns(
        run,
        writer,
        queue.trajectory_id,
        queue.epoch,
        is_placed=queue.is_placed,
        first=queue.num_acknowledged,
        records=records,
        is_sealed=seals,
    )


def seals_of(run: str, writer: str, queues: Sequence[TrajectoryQueue]) -> PostSeals:
    """Return the request that posts the seals of these trajectories to the run."""
    seals = [
        PostedSeal(
            queue.trajectory_id,
            queue.epoch,
            queue.awaits_reward,
            queue.num_bytes + len(queue.seal_record),
            queue.seal_record,
        )
        for queue in queues
    ]
    return PostSeals(run, writer, seals)
