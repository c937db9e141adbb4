"""The rules of both publishers, without the waiting."""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from turnstream.errors import InvalidConfigError, InvalidTurnError, TurnstreamError, WaitKind
from turnstream.generator.api.adoption import adopt_trajectory
from turnstream.generator.api.trajectory_core import (
    Carrier,
    TrajectoryWriterBase,
    restore_turns,
)
from turnstream.generator.api.work import WorkQueue
from turnstream.generator.encode import checks
from turnstream.generator.encode.encoder import DraftedTrajectory, draft_group
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import Delivery
from turnstream.generator.outbox.resend import KEEP_S, MAX_KEPT_BYTES
from turnstream.generator.outbox.target import TargetRun
from turnstream.generator.outbox.trajectory_queue import Lane, RewardPost
from turnstream.generator.transport.steps import Steps
from turnstream.store.client.connection import address_of, checked_url
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
from turnstream.types import DeclaredColumn, Group, GroupOpened, Purpose, TrajectoryKey
from turnstream.types.names import shown
from turnstream.types.scalars import flag, seconds, whole_number

MAX_INFLIGHT_BYTES: Final = 64 * 1024 * 1024
TIMEOUT_S: Final = 300.0
ADMISSION_TIMEOUT_S: Final = 3600.0

LAST_FLUSH_S: Final = 10.0
"""How long a publisher that an exception has left still tries to send the accepted writes."""

_MAX_NOTES: Final = 5  # notes on the first error about the others

_logger = logging.getLogger(__name__)

_Receipt = TypeVar("_Receipt", bound=Delivery)
_Carrier = TypeVar("_Carrier", bound=Carrier[Any])
_Writer = TypeVar("_Writer", bound=TrajectoryWriterBase[Any])
_GroupWriter = TypeVar("_GroupWriter")


class PublisherCore(ABC, Generic[_Carrier, _Receipt, _GroupWriter, _Writer]):
    """Sends the trajectories of one generator to a run. Its arguments: see Publisher."""

    def __init__(
        self,
        url: str,
        run: str,
        *,
        writer: str | None = None,
        max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
        timeout_s: float = TIMEOUT_S,
        admission_timeout_s: float = ADMISSION_TIMEOUT_S,
        keep_s: float = KEEP_S,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        address = address_of(checked_url(url))
        if writer is None:
            writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        checks.checked_name(run, field="run")
        self._outbox = Outbox(
            TargetRun(run),
            checks.checked_name(writer, field="writer"),
            max_inflight_bytes=_num_bytes(max_inflight_bytes, field="max_inflight_bytes"),
            timeout_s=seconds(timeout_s, field="timeout_s", least=0),
            admission_timeout_s=seconds(admission_timeout_s, field="admission_timeout_s", least=0),
            jitter=random.random,
            address=address,
            keep_s=seconds(keep_s, field="keep_s", least=0),
            max_kept_bytes=_num_bytes(max_kept_bytes, field="max_kept_bytes"),
        )
        self._sender = self._connect(url)
        self._unread_failures: list[Delivery] = []
        self._work = WorkQueue(self._outbox.writer)

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
        group = _checked_opening(
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
        group = _checked_opening(
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

    def _adopt(self, key: TrajectoryKey, declared: Sequence[DeclaredColumn]) -> Steps[_Writer]:
        """Return the writer of a trajectory that this publisher adopts."""
        outbox = self._outbox
        adopted = yield from adopt_trajectory(
            outbox.run, writer=outbox.writer, key=key, declared=declared
        )
        lane = self._sender.put(
            lambda: outbox.tracker.adopt(
                key,
                epoch=adopted.epoch,
                num_turns=len(adopted.turns),
                num_bytes=sum(len(each.stored.record) for each in adopted.turns),
                now_s=time.monotonic(),
            )
        )
        group = GroupOpened(group_id=key.group_id, prompt_uid="", num_samples=adopted.num_samples)
        writer = self._writer(group, key, lane)
        restore_turns(writer, adopted.turns)
        return writer

    def _next_refill(self, wait: StoreWait) -> Steps[Refill]:
        """Return a refill that is open and this publisher's."""
        run = yield from self._found()
        return (yield from self._work.next_refill(run, wait))

    def _next_task(self, wait: StoreWait) -> Steps[tuple[OfferedTask, list[_Writer]]]:
        """Return a task and the writers of its trajectories, which are open."""
        run = yield from self._found()
        return (yield from self._work.next_task(run, wait, adopt=self._writers_of))

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

    def _writers_of(self, taken: TakenTask) -> list[_Writer]:
        """Return the writers of a task; none if this publisher writes it already."""
        task, now_s = taken.task, time.monotonic()
        lanes = self._sender.put(
            lambda: self._outbox.admissions.adopt(
                task.group, taken.epochs, now_s=now_s, prompt_number=task.number
            )
        )
        return [self._writer(task.group, lane.key, lane) for lane in lanes]

    def _drafted(
        self, group: Group, declared: Sequence[DeclaredColumn]
    ) -> tuple[GroupOpened, list[DraftedTrajectory]]:
        """Return a finished group as it is sent, after validation."""
        drafted = draft_group(group, extra_columns=declared)
        opening = _checked_opening(
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
            lambda: _send_group(self._outbox, group=opening, drafted=drafted, end=receipt)
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


def _num_bytes(value: int, *, field: str) -> int:
    return whole_number(value, field=field, limit=2**63, refusal=InvalidConfigError)


def _checked_opening(
    group_id: str,
    num_samples: int,
    prompt_uid: str,
    *,
    num_needed: int | None = None,
    purpose: Purpose | str = Purpose.TRAIN,
) -> GroupOpened:
    """Return the event of a group that begins, checked; `num_needed` None means all samples."""
    checks.check_group(group_id, num_samples=num_samples, num_needed=num_needed)
    purpose = checks.checked_purpose(purpose, num_samples=num_samples, num_needed=num_needed)
    checks.checked_text(prompt_uid, field="prompt_uid")
    return GroupOpened(
        group_id=group_id,
        prompt_uid=prompt_uid,
        num_samples=int(num_samples),
        num_needed=int(num_needed or num_samples),
        purpose=purpose,
    )


def _send_group(
    outbox: Outbox, *, group: GroupOpened, drafted: list[DraftedTrajectory], end: Delivery
) -> None:
    """Put a whole finished group into the outbox; `end` has one part per trajectory."""
    lanes = outbox.admit(group, [made.key for made in drafted])
    for lane, made in zip(lanes, drafted, strict=True):
        for turn in made.turns:
            outbox.append(lane, turn)
        outbox.seal(
            lane,
            made.seal,
            merged_tokens=made.merged_tokens,
            end=end,
            awaits_reward=made.awaits_reward,
        )


def checked_key(group_id: str, sample: int, attempt: int) -> TrajectoryKey:
    """Return the name of a trajectory whose group another generator opened."""
    key = TrajectoryKey(group_id, sample, attempt)
    checks.check_key(key, num_samples=None)
    return TrajectoryKey(group_id, int(sample), int(attempt))


def warn_open_trajectories(outbox: Outbox) -> None:
    """Log a warning if a publisher closes with open trajectories."""
    if outbox.num_open:
        _logger.warning(
            "run %s: %s leaves %d trajectories open: when their leases end they may be adopted, "
            "or are abandoned",
            outbox.run,
            outbox.writer,
            outbox.num_open,
        )


def raise_unread(failures: list[Delivery], losses: list[TurnstreamError]) -> None:
    """Raise the losses and the unread errors as one error, and clear the list."""
    unread = [failed for failed in failures if not failed.was_read]
    failures.clear()
    errors = [*losses, *(error for failed in unread for error in failed.errors.values())]
    if not errors:
        return
    first, *others = dict.fromkeys(errors)
    first.others = tuple(others)
    for other in others[:_MAX_NOTES]:
        first.add_note(f"and {other}")
    if len(others) > _MAX_NOTES:
        first.add_note(f"and {len(others) - _MAX_NOTES} more")
    raise first
