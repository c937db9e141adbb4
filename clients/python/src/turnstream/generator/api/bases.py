"""The common bases of both publishers and of their trajectory writers, without the waiting."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from turnstream.errors import InvalidTurnError, RejectedError, WaitKind
from turnstream.generator.api import writers
from turnstream.generator.api.refills import take_refill
from turnstream.generator.api.takeovers import Taken, take_over
from turnstream.generator.api.tasks import take_task
from turnstream.generator.encode.checks import check_key
from turnstream.generator.encode.encoder import (
    DraftedTrajectory,
    SealMaker,
    TrajectoryDraft,
    TurnRecord,
    draft_group,
)
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import Delivery
from turnstream.generator.outbox.resend import KEEP_S, MAX_KEPT_BYTES
from turnstream.generator.outbox.trajectory_queue import Lane, RewardPost
from turnstream.generator.transport.steps import Steps
from turnstream.store.client.run_ids import parse_incarnation
from turnstream.store.run.groups import (
    Refill,
    Unfinished,
    parse_unfinished,
    read_group_command,
)
from turnstream.store.run.rewards import reward_command
from turnstream.store.run.tasks import OfferedTask, TakenTask
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.types import (
    DeclaredColumn,
    Group,
    GroupOpened,
    Purpose,
    TrajectoryKey,
    Turn,
)
from turnstream.types.names import shown
from turnstream.types.scalars import flag

_MAX_REASON_LENGTH = 200  # a ledger keeps it for every trajectory

_Result = TypeVar("_Result")
_Receipt = TypeVar("_Receipt", bound=Delivery)
_Receipt_co = TypeVar("_Receipt_co", bound=Delivery, covariant=True)


class Carrier(Protocol[_Receipt_co]):
    """Sends an outbox to the store, with a thread or with a task."""

    def put(self, write: Callable[[], _Result]) -> _Result:
        """Do something to the outbox, and send what comes of it."""
        ...

    def receipt(
        self, num_parts: int = 1, *, unread_failures: list[Delivery] | None = None
    ) -> _Receipt_co:
        """A receipt that can be waited for."""
        ...

    def require_open(self) -> None:
        """Refuse writes after `close`."""
        ...


_Carrier = TypeVar("_Carrier", bound=Carrier[Any])


class TrajectoryWriterBase(ABC, Generic[_Carrier]):
    """A trajectory being written.

    Args:
        sender: sender of the publisher.
        outbox: outbox of the publisher.
        group: group of the trajectory, which the first use opens if no lane is given.
        key: name of the trajectory.
        lane: lane of a trajectory that is open; None asks for admission at the first use.
    """

    def __init__(
        self,
        sender: _Carrier,
        outbox: Outbox,
        group: GroupOpened,
        key: TrajectoryKey,
        lane: Lane | None,
    ) -> None:
        check_key(key, num_samples=group.num_samples)
        self._sender = sender
        self._outbox = outbox
        self._group = group
        self._key = TrajectoryKey(key.group_id, int(key.sample), int(key.attempt))
        self._lane = lane
        self._draft: TrajectoryDraft | None = None
        self._turns: tuple[Turn, ...] = ()
        self._has_ended = False

    @property
    def key(self) -> TrajectoryKey:
        """The name of the trajectory in its run."""
        return self._key

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that were stored when it was taken over, whole; empty if it was not."""
        return self._turns

    @property
    def has_ended(self) -> bool:
        """Whether it was sealed or abandoned."""
        return self._has_ended

    @abstractmethod
    def abandon(self, reason: str) -> Delivery:
        """End the trajectory untrained."""

    def _restore(self, taken: Taken) -> None:
        """Continue after the turns that an earlier writer stored."""
        for record, turn, shape in taken.turns:
            self._drafted.restore(turn, TurnRecord(record, shape))
        self._turns = tuple(each.turn for each in taken.turns)

    @property
    def _drafted(self) -> TrajectoryDraft:
        """The turns so far; made when the columns of the run are known."""
        if self._draft is None:
            columns = self._outbox.extra_columns or ()
            self._draft = TrajectoryDraft(self._key, extra_columns=columns)
        return self._draft

    def _require_open(self) -> None:
        """Refuse writes to a trajectory that was sealed or abandoned here."""
        if self._has_ended:
            raise RejectedError(f"trajectory {self._key} is sealed or abandoned")

    def _request_admission(self, opened: Delivery) -> Lane:
        """Ask for the admission of the trajectory; the store's answer settles `opened`."""
        key, group = self._key, self._group
        self._lane = self._sender.put(lambda: self._outbox.admit(group, [key], opened=opened)[0])
        return self._lane

    def _has_capacity(self, turn: Turn) -> Callable[[], bool]:
        """Return a test for capacity for this turn; its encoded size may be smaller."""
        num_tokens = len(turn.prompt_ids) + 2 * len(turn.response_ids)
        num_bytes = 4 * num_tokens + sum([values.nbytes for values in turn.extras.values()])
        return lambda: self._outbox.inflight.has_capacity_for_turn(num_bytes)

    def _put_seal(self, lane: Lane, seal: SealMaker, end: Delivery, *, awaits_reward: bool) -> None:
        """Put the seal after the last turn; the store's answer settles `end`."""
        merged_tokens = self._drafted.merged_tokens
        self._sender.put(
            lambda: self._outbox.seal(
                lane, seal, merged_tokens=merged_tokens, end=end, awaits_reward=awaits_reward
            )
        )
        self._has_ended = True

    def _put_abandon(self, reason: str, end: Delivery) -> None:
        """Abandon the trajectory after its last turn, if it was opened."""
        if not isinstance(reason, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurnError("reason", f"{shown(reason)} is not a text")
        self._require_open()
        lane = self._lane
        if lane is None:
            self._sender.require_open()
            end.settle(self._key)
        else:
            # It may quote anything; invalid Unicode could not be sent.
            text = reason[:_MAX_REASON_LENGTH].encode(errors="replace").decode()
            self._sender.put(lambda: self._outbox.abandon(lane, text, end=end))
        self._has_ended = True


_Writer = TypeVar("_Writer", bound=TrajectoryWriterBase[Any])


_GroupWriter = TypeVar("_GroupWriter")


class PublisherBase(ABC, Generic[_Carrier, _Receipt, _GroupWriter, _Writer]):
    """Sends the trajectories of one generator to a run. Its arguments: see Publisher."""

    def __init__(
        self,
        url: str,
        run: str,
        *,
        writer: str | None = None,
        max_inflight_bytes: int = writers.MAX_INFLIGHT_BYTES,
        timeout_s: float = writers.TIMEOUT_S,
        admission_timeout_s: float = writers.ADMISSION_TIMEOUT_S,
        keep_s: float = KEEP_S,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._outbox = writers.new_outbox(
            run,
            url=url,
            writer=writer,
            max_inflight_bytes=max_inflight_bytes,
            timeout_s=timeout_s,
            admission_timeout_s=admission_timeout_s,
            keep_s=keep_s,
            max_kept_bytes=max_kept_bytes,
        )
        self._sender = self._connect(url)
        self._unread_failures: list[Delivery] = []
        self._tried_refills: dict[TrajectoryKey, object] = {}
        self._unanswered: deque[OfferedTask] = deque()

    def group(
        self,
        group_id: str,
        num_samples: int,
        *,
        num_needed: int | None = None,
        prompt_uid: str = "",
        purpose: Purpose | str = Purpose.TRAIN,
        exist_ok: bool = False,
    ) -> _GroupWriter:
        """Return a group of which this publisher writes every sample.

        Entering it waits for admission and opens all samples at once. Leaving it abandons the
        samples without a seal, so that the group can end, and logs a warning with their numbers.

        Args:
            group_id: name of the group; a run uses it once.
            num_samples: number of its trajectories.
            num_needed: members that decide the group, the first that are sealed; None for all.
            prompt_uid: the dataset's name of the prompt.
            purpose: "train", or "eval" for a group that is never trained.
            exist_ok: accept a group that was opened before, and iterate over its unfinished
                samples only. So a restarted generator can iterate over its prompts again. A sample
                that an earlier process left with turns and without a seal is abandoned. Samples of
                another writer are adopted when their lease ends (at most `lease_s` of the run), or
                left to that writer if it renews the lease. A publisher with the same `writer` as
                before does not wait.

        Raises:
            InvalidTurnError: the name or a number is invalid.
            ConflictError: on entering, the group was opened before, and `exist_ok` is False or its
                `num_samples` differs.
        """
        group = writers.checked_opening(
            group_id, num_samples, prompt_uid, num_needed=num_needed, purpose=purpose
        )
        return self._group_writer(group, exist_ok=flag(exist_ok, field="exist_ok"))

    def trajectory(
        self,
        group_id: str,
        sample: int,
        *,
        num_samples: int,
        num_needed: int | None = None,
        prompt_uid: str = "",
        purpose: Purpose | str = Purpose.TRAIN,
        attempt: int = 0,
    ) -> _Writer:
        """Return the writer of one sample of a group that several generators may share.

        Entering it opens the group, and waits for admission.

        Args:
            group_id: the same for all samples that are compared with each other.
            sample: from 0 to `num_samples` - 1.
            num_samples: samples of the group.
            num_needed: members that decide the group, the first that are sealed; None for all.
            prompt_uid: the dataset's name of the prompt.
            purpose: "eval" waits for bytes alone and is never trained: `turnstream evals`.
            attempt: number of the retry of an abandoned sample, below 1,000.

        Raises:
            InvalidTurnError: the key is invalid.
        """
        group = writers.checked_opening(
            group_id, num_samples, prompt_uid, num_needed=num_needed, purpose=purpose
        )
        key = TrajectoryKey(group_id, sample, attempt)
        return self._writer(group, key)

    def refill_trajectory(self, refill: Refill) -> _Writer:
        """Return the writer of an attempt that `next_refill` returned.

        Raises:
            InvalidTurnError: it is no Refill.
        """
        if not isinstance(refill, Refill):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurnError("refill", f"{shown(refill)} is not a Refill")
        return self._writer(refill.group, refill.key)

    @abstractmethod
    def _connect(self, url: str) -> _Carrier:
        """Make what carries the outbox, and a client for calls that wait for their answer."""

    @abstractmethod
    def _group_writer(self, group: GroupOpened, *, exist_ok: bool) -> _GroupWriter: ...

    @abstractmethod
    def _writer(
        self, group: GroupOpened, key: TrajectoryKey, lane: Lane | None = None
    ) -> _Writer: ...

    @abstractmethod
    def _wait(
        self, what: str, kind: WaitKind | None = None, wait_s: float | None = None
    ) -> StoreWait:
        """Return the wait of a call; without a deadline of its own it has the publisher's."""

    def _found(self) -> Steps[str]:
        """Return the id of the run; only the first call asks the store."""
        target = self._outbox.target
        if not target.is_found:
            answer = yield ("GET", target.pointer)
            target.found(parse_incarnation(target.run, answer))
        return self._outbox.run

    def _take_over(self, key: TrajectoryKey, declared: Sequence[DeclaredColumn]) -> Steps[_Writer]:
        """Return the writer of a trajectory that this publisher adopts."""
        outbox = self._outbox
        taken = yield from take_over(outbox.run, writer=outbox.writer, key=key, declared=declared)
        return self._taken_over(key, taken)

    def _next_refill(self, wait: StoreWait) -> Steps[Refill]:
        """Return a refill that is open and this publisher's."""
        run = yield from self._found()
        writer = self._outbox.writer
        return (yield from take_refill(run, writer=writer, wait=wait, tried=self._tried_refills))

    def _next_task(self, wait: StoreWait) -> Steps[tuple[OfferedTask, list[_Writer]]]:
        """Return a task and the writers of its trajectories, which are open."""
        run = yield from self._found()
        return (
            yield from take_task(
                run,
                writer=self._outbox.writer,
                adopt=self._writers_of,
                wait=wait,
                unanswered=self._unanswered,
            )
        )

    def _unfinished(self, group: GroupOpened) -> Steps[Unfinished]:
        """Return the samples without an end of a group that may exist."""
        run = yield from self._found()
        reply = yield read_group_command(run, group)
        return parse_unfinished(reply, num_samples=group.num_samples)

    def _is_written_here(self, key: TrajectoryKey) -> bool:
        """Return whether this publisher has the trajectory open."""
        return self._sender.put(lambda: self._outbox.tracker.has_any({key}))

    def _reward(
        self,
        key: TrajectoryKey,
        reward: float | None,
        reward_components: Mapping[str, float] | None,
    ) -> tuple[RewardPost, _Receipt]:
        """A reward on its way; it knows its outcome when the receipt is done."""
        command = reward_command(self._outbox.run, key, reward, reward_components)
        receipt = self._sender.receipt()
        post = RewardPost(command, receipt)
        self._sender.put(lambda: self._outbox.post_reward(post))
        return post, receipt

    def _taken_over(self, key: TrajectoryKey, taken: Taken) -> _Writer:
        """Return the writer of an adopted trajectory."""
        num_bytes = sum(len(each.record) for each in taken.turns)
        lane = self._sender.put(
            lambda: self._outbox.tracker.adopt(
                key,
                epoch=taken.epoch,
                num_turns=len(taken.turns),
                num_bytes=num_bytes,
                now_s=time.monotonic(),
            )
        )
        group = GroupOpened(group_id=key.group_id, prompt_uid="", num_samples=taken.num_samples)
        writer = self._writer(group, key, lane)
        writer._restore(taken)
        return writer

    def _writers_of(self, taken: TakenTask) -> list[_Writer]:
        """Return the writers of a task; none if this publisher writes it already."""
        now_s = time.monotonic()
        lanes = self._sender.put(
            lambda: self._outbox.admissions.adopt(
                taken.task.group,
                taken.epochs,
                now_s=now_s,
                prompt_number=taken.task.number,
            )
        )
        return [self._writer(taken.task.group, lane.key, lane) for lane in lanes]

    def _drafted(
        self, group: Group, declared: Sequence[DeclaredColumn]
    ) -> tuple[GroupOpened, list[DraftedTrajectory]]:
        """Return a finished group as it is sent, after validation."""
        drafted = draft_group(group, extra_columns=declared)
        opening = writers.checked_opening(
            group.group_id, len(drafted), group.prompt_uid, purpose=group.purpose
        )
        return opening, drafted

    @property
    def _capacity_timeout_s(self) -> float:
        """Return how long a finished group may wait for capacity."""
        return self._outbox.timeout_s + self._outbox.admission_timeout_s

    def _has_capacity(self, drafted: Sequence[DraftedTrajectory]) -> Callable[[], bool]:
        """Return a test for capacity for a finished group."""
        num_bytes = sum(len(turn.record) for made in drafted for turn in made.turns)
        return lambda: self._outbox.inflight.has_capacity_for_group(num_bytes)

    def _sent(self, opening: GroupOpened, drafted: list[DraftedTrajectory]) -> _Receipt:
        """Send a finished group; return its receipt."""
        receipt = self._sender.receipt(len(drafted), unread_failures=self._unread_failures)
        self._sender.put(
            lambda: writers.send_group(self._outbox, group=opening, drafted=drafted, end=receipt)
        )
        return receipt

    def _failed(self, error: Exception) -> _Receipt:
        """The receipt of a group that could not be checked, since the run did not answer."""
        self._sender.require_open()
        receipt = self._sender.receipt(unread_failures=self._unread_failures)
        receipt.settle(None, error)
        return receipt

    def _closing(self, reason: str) -> _Receipt:
        """The receipt of a request to close the run to new groups."""
        receipt = self._sender.receipt()
        self._sender.put(lambda: self._outbox.close_run(reason, receipt))
        return receipt
