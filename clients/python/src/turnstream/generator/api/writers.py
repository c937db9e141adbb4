"""Common functions of both publishers, without the waiting."""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
from collections.abc import Sequence

from turnstream.errors import InvalidConfigError, TurnstreamError
from turnstream.generator.encode import checks
from turnstream.generator.encode.encoder import DraftedTrajectory
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import Delivery
from turnstream.generator.outbox.target import TargetRun
from turnstream.store.client.connection import address_of, checked_url
from turnstream.store.waits.wait_reasons import UNSEALED
from turnstream.types import GroupOpened, Purpose, TrajectoryKey
from turnstream.types.scalars import seconds, whole_number

MAX_INFLIGHT_BYTES = 64 * 1024 * 1024
TIMEOUT_S = 300.0
ADMISSION_TIMEOUT_S = 3600.0

LAST_FLUSH_S = 10.0
"""How long a publisher that an exception has left still tries to send what it accepted."""

NOT_STARTED = "never started"

_logger = logging.getLogger(__name__)

_MAX_NOTES = 5  # notes on the first error about the others


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
