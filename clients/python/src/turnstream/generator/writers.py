"""What the writers of both publishers have in common: everything but the waiting."""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Self

from turnstream.errors import (
    InvalidConfigError,
    InvalidTurnError,
    RejectedError,
    TurnstreamError,
)
from turnstream.generator import checks
from turnstream.generator.drafts import DraftedTrajectory, TrajectoryDraft, TurnRecord
from turnstream.generator.lanes import Lane
from turnstream.generator.outbox import Outbox
from turnstream.generator.receipts import Delivery
from turnstream.generator.takeovers import Taken
from turnstream.generator.target import TargetRun
from turnstream.store.connection import address_of, checked_url
from turnstream.store.wait_reasons import UNSEALED
from turnstream.types import GroupOpened, Purpose, Status, TrajectoryKey, Turn
from turnstream.types.names import shown
from turnstream.types.scalars import seconds, whole_number

MAX_INFLIGHT_BYTES = 64 * 1024 * 1024
TIMEOUT_S = 300.0
ADMISSION_TIMEOUT_S = 3600.0

LAST_FLUSH_S = 10.0
"""How long a publisher that an exception has left still tries to send what it accepted."""

NOT_STARTED = "never started"

_logger = logging.getLogger(__name__)

_MAX_REASON_LENGTH = 200  # a ledger keeps it for every trajectory
_MAX_NOTES = 5  # of an error, for those beside it


def new_outbox(
    run: str,
    *,
    url: str,
    writer: str | None,
    max_inflight_bytes: int,
    timeout_s: float,
    admission_timeout_s: float,
    keep_s: float,
    max_kept_bytes: int,
) -> Outbox:
    """Return the outbox of one publisher; without a name it is named after host and process.

    Raises:
        BatchingError: names the argument and its value.
    """
    address = address_of(checked_url(url))
    if writer is None:
        writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    checks.checked_name(run, field="run")
    return Outbox(
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


def _num_bytes(value: int, *, field: str) -> int:
    return whole_number(value, field=field, limit=2**63, refusal=InvalidConfigError)


def checked_opening(
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


def send_group(
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


def warn_unsealed(group_id: str, samples: Sequence[int]) -> None:
    """Log that samples were abandoned because their block was left without a seal."""
    _logger.warning(
        "group %s: sample %s left without a seal, so it is abandoned and not trained: call "
        "seal(reward=...) before the block ends",
        *(group_id, ", ".join(map(str, samples))),
    )


def reason_of(error: BaseException | None) -> str:
    """Return why a with block was left, for the ledger."""
    if error is None:
        return UNSEALED
    return f"{type(error).__name__}: {error}"


class WriterState:
    """One trajectory: its draft, its lane, and whether it has ended.

    Args:
        outbox: where its writes go.
        group: its group, in case that it must be opened.
        key: its name.
        lane: where it is open already; None asks for leave at the first use.
    """

    def __init__(
        self, outbox: Outbox, group: GroupOpened, key: TrajectoryKey, lane: Lane | None
    ) -> None:
        checks.check_key(key, num_samples=group.num_samples)
        self.key = TrajectoryKey(key.group_id, int(key.sample), int(key.attempt))
        self._draft: TrajectoryDraft | None = None
        self.has_ended = False
        self.lane = lane
        self.turns: tuple[Turn, ...] = ()
        self._outbox = outbox
        self._group = group

    @property
    def draft(self) -> TrajectoryDraft:
        """Its turns so far; made when the columns of the run are known."""
        if self._draft is None:
            columns = self._outbox.extra_columns or ()
            self._draft = TrajectoryDraft(self.key, extra_columns=columns)
        return self._draft

    @classmethod
    def taken_over(cls, outbox: Outbox, key: TrajectoryKey, taken: Taken, now_s: float) -> Self:
        """The state of a trajectory that another writer began; it has a lane."""
        group = GroupOpened(group_id=key.group_id, prompt_uid="", num_samples=taken.num_samples)
        lane = outbox.adopt(
            key,
            epoch=taken.epoch,
            num_turns=len(taken.turns),
            num_bytes=sum(len(each.record) for each in taken.turns),
            now_s=now_s,
        )
        state = cls(outbox, group, key, lane)
        for record, turn, shape in taken.turns:
            state.draft.restore(turn, TurnRecord(record, shape))
        state.turns = tuple(each.turn for each in taken.turns)
        return state

    def ask_leave(self, opened: Delivery) -> Lane:
        """Open the trajectory; `opened` is told when that is so."""
        return self._outbox.admit(self._group, [self.key], opened=opened)[0]

    def require_open(self) -> None:
        """Refuse writes to a trajectory that was sealed or abandoned here."""
        if self.has_ended:
            raise RejectedError(f"trajectory {self.key} is sealed or abandoned")

    @property
    def room_timeout_s(self) -> float:
        """How long a turn may wait for room."""
        return self._outbox.timeout_s

    def has_room(self, turn: Turn) -> bool:
        """Whether this turn may be accepted now; it may prove smaller when it is encoded."""
        num_tokens = len(turn.prompt_ids) + 2 * len(turn.response_ids)
        num_extra_bytes = sum([values.nbytes for values in turn.extras.values()])
        return self._outbox.tally.has_room_for_turn(4 * num_tokens + num_extra_bytes)

    def append(self, lane: Lane, turn: TurnRecord, receipt: Delivery) -> None:
        """Put a turn that the draft has made behind the others."""
        self._outbox.append(lane, turn, receipt)

    def seal(
        self,
        lane: Lane,
        end: Delivery,
        *,
        reward: float | None,
        reward_components: Mapping[str, float] | None,
        status: Status | str,
        sampling: Mapping[str, float] | None,
        tags: Mapping[str, str] | None,
        metrics: Mapping[str, float] | None,
        awaits_reward: bool,
    ) -> None:
        """Put the seal behind the last turn."""
        self.require_open()
        make_seal = self.draft.seal(
            reward=reward,
            reward_components=reward_components,
            status=status,
            sampling=sampling,
            tags=tags,
            metrics=metrics,
            awaits_reward=awaits_reward,
        )
        self._outbox.seal(
            lane,
            make_seal,
            merged_tokens=self.draft.merged_tokens,
            end=end,
            awaits_reward=awaits_reward,
        )
        self.has_ended = True

    def abandon(self, reason: str, end: Delivery) -> None:
        """Abandon the trajectory after its last turn, if it was opened.

        Raises:
            InvalidTurnError: the reason is no text.
            RejectedError: the trajectory has ended.
        """
        if not isinstance(reason, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurnError("reason", f"{shown(reason)} is not a text")
        self.require_open()
        self.has_ended = True
        if self.lane is None:
            end.settle(self.key)
        else:
            # It may quote anything; what is no valid Unicode could not be sent.
            text = reason[:_MAX_REASON_LENGTH].encode(errors="replace").decode()
            self._outbox.abandon(self.lane, text, end=end)


def checked_key(group_id: str, sample: int, attempt: int) -> TrajectoryKey:
    """The name of a trajectory whose group somebody else has opened, checked."""
    key = TrajectoryKey(group_id, sample, attempt)
    checks.check_key(key, num_samples=None)
    return TrajectoryKey(group_id, int(sample), int(attempt))


def tell_what_stays_open(outbox: Outbox) -> None:
    """Say that a publisher leaves trajectories behind, which nobody keeps from now on."""
    if outbox.num_open:
        _logger.warning(
            "run %s: %s leaves %d trajectories open: when their leases end they may be taken over, "
            "or are given up",
            outbox.run,
            outbox.writer,
            outbox.num_open,
        )


def raise_unread(failures: list[Delivery], losses: list[TurnstreamError]) -> None:
    """Raise what is lost and the errors that nobody has asked for, as one; forget the errors."""
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
