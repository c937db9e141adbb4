"""Why a wait on an outbox brings nothing: typed reasons, from what it holds. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from turnstream.errors import WaitKind, WaitReason
from turnstream.generator.outbox.receipts import Delivery
from turnstream.generator.outbox.trajectory_queue import Admission, Lane
from turnstream.store.waits.awaited import admission_awaited

MAX_NAMED: Final = 8
"""Trajectories, and groups, that are named."""


def of_writes(
    lanes: Iterable[Lane], delivery: Delivery | None, *, silent_s: float | None
) -> list[WaitReason]:
    """Return the unacknowledged writes.

    Args:
        lanes: lanes that have not ended.
        delivery: only the writes of this one; None for all.
        silent_s: seconds since the last answer of the store; None before the first.
    """
    answered = f"the store last answered {silent_s or 0.0:.1f} s ago"
    if silent_s is None:
        answered = "the store has not answered yet"
    return list(islice(_of_writes(lanes, delivery, answered, silent_s), MAX_NAMED))


def _of_writes(
    lanes: Iterable[Lane], delivery: Delivery | None, answered: str, silent_s: float | None
) -> Iterator[WaitReason]:
    for lane in lanes:
        turn = _first_turn(lane, delivery)
        is_ending = lane.end is not None and delivery in (None, lane.end)
        if turn is None and not is_ending:
            continue
        what = f"turn {turn}" if turn is not None else _end_in_words(lane)
        place = "" if lane.epoch else ", which is not open yet,"
        yield WaitReason(
            WaitKind.NOT_ACKNOWLEDGED,
            f"{what} of {lane.key.readable_name}{place} is not acknowledged; {answered}",
            {
                "group": lane.key.group_id,
                "sample": lane.key.sample,
                "attempt": lane.key.attempt,
                "turn": turn,
                "turns_waiting": len(lane.pending),
                "silent_s": silent_s,
            },
        )


def _first_turn(lane: Lane, delivery: Delivery | None) -> int | None:
    """Number of the first turn that waits, of this delivery if one is given."""
    for number, pending in enumerate(lane.pending, lane.num_acknowledged):
        if delivery is None or pending.receipt is delivery:
            return number
    return None


def _end_in_words(lane: Lane) -> str:
    behind = f", behind {len(lane.pending)} turns," if lane.pending else ""
    return ("the seal" if lane.seal is not None else "the giving up") + behind


def of_what_ends(
    what: Lane | Admission | str, *, silent_s: float | None, now_s: float
) -> list[WaitReason]:
    """Return the reason for a failed trajectory, waiting group, or named call."""
    match what:
        case Lane():
            return of_writes([what], None, silent_s=silent_s)
        case Admission(group=group, since_s=None):
            sentence = f"group {group.group_id} has asked for admission, and was not answered"
            facts = {"group": group.group_id, "samples": group.num_samples}
            return [WaitReason(WaitKind.NOT_ACKNOWLEDGED, sentence, facts)]
        case Admission(group=group, reason=reason, since_s=since_s):
            return [admission_awaited(group, reason, waited_s=now_s - (since_s or now_s))]
        case str():
            sentence = f"{what} is not acknowledged"
            return [WaitReason(WaitKind.NOT_ACKNOWLEDGED, sentence, {"call": what})]


def no_space(*, inflight_bytes: int, held_bytes: int, max_inflight_bytes: int) -> WaitReason:
    """Return the reason for a lack of space."""
    return WaitReason(
        WaitKind.NO_SPACE,
        f"{inflight_bytes + held_bytes:,} bytes are not acknowledged, {held_bytes:,} of them of "
        f"groups that wait for admission; max_inflight_bytes is {max_inflight_bytes:,}",
        {
            "inflight_bytes": inflight_bytes,
            "held_bytes": held_bytes,
            "max_inflight_bytes": max_inflight_bytes,
        },
    )


def not_on_disk(*, left_s: float, keep_s: float) -> WaitReason:
    """The store may still lose what it has acknowledged."""
    return WaitReason(
        WaitKind.NOT_ON_DISK,
        f"what was acknowledged {max(0.0, keep_s - left_s):.1f} s ago is on disk when the store "
        f"still answers {keep_s:g} s after it, in {left_s:.1f} s",
        {"left_s": left_s, "keep_s": keep_s},
    )
