"""For how long a run is where it is, by the clock of its store, and whose turn it is. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

MAX_RANKS: Final = 8
"""Most ranks in a sentence."""


class Durations(NamedTuple):
    """Durations in seconds; None if the start was not recorded.

    Attributes:
        trainer_s: since the trainer session can have the step after the last stepped one.
        step_s: since that step is the next one that the run needs.
        opened_s: since the last group was opened to train.
    """

    trainer_s: float | None = None
    step_s: float | None = None
    opened_s: float | None = None


NOT_NOTED: Final = Durations()


def durations(
    now_ms: int,
    session_ms: bytes | None,
    opened_ms: bytes | None,
    stepped_ms: bytes | None,
    planned_ms: bytes | None,
) -> Durations:
    """Return the durations from the times of the session, the newest group, and the step.

    A later session has a planned step since its start. A session that ended restarts the wait.

    >>> durations(9_000, b"2000", b"1000", b"4000", b"5000")
    Durations(trainer_s=4.0, step_s=5.0, opened_s=8.0)
    >>> durations(9_000, b"6000", None, b"4000", None)
    Durations(trainer_s=None, step_s=3.0, opened_s=None)
    """
    return Durations(
        trainer_s=_since_s(now_ms, session_ms, stepped_ms, planned_ms) if planned_ms else None,
        step_s=_since_s(now_ms, session_ms, stepped_ms),
        opened_s=_since_s(now_ms, opened_ms),
    )


def _since_s(now_ms: int, *moments: bytes | None) -> float | None:
    """Seconds since the last of these; a clock that was set back makes none of them negative."""
    known = [int(moment) for moment in moments if moment]
    return max(0, now_ms - max(known)) / 1_000 if known else None


def ranks_behind(ranks: Mapping[bytes, bytes], *, dp_world_size: int, step: int) -> tuple[int, ...]:
    """Return the ranks that have not asked for a step, from the hash `ranks`.

    Empty for a session of one rank: its rank is the trainer.

    >>> ranks_behind({b"0": b"5:ab", b"2": b"4:cd"}, dp_world_size=3, step=5)
    (1, 2)
    """
    if dp_world_size < 2:
        return ()
    newest = {int(rank): int(has.partition(b":")[0]) for rank, has in ranks.items()}
    return tuple(rank for rank in range(dp_world_size) if newest.get(rank, 0) < step)


def for_so_long(seconds: float | None, *, verb: str = "") -> str:
    """Return a duration in words; empty if it is unknown.

    >>> for_so_long(95.2), for_so_long(95.2, verb=" waits"), for_so_long(None, verb=" waits")
    (' for 95 s', ' waits for 95 s', '')
    """
    return "" if seconds is None else f"{verb} for {seconds:.0f} s"


def last_opened(seconds: float | None) -> str:
    """Return when the newest group was opened; empty if unknown.

    >>> last_opened(95.2), last_opened(None)
    ('; the last was opened 95 s ago', '')
    """
    return "" if seconds is None else f"; the last was opened {seconds:.0f} s ago"


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks by number, at most MAX_RANKS.

    >>> named_ranks([1, 3]), named_ranks(range(10))
    ('1, 3', '0, 1, 2, 3, 4, 5, 6, 7 and 2 others')
    """
    shown = ", ".join(map(str, ranks[:MAX_RANKS]))
    return shown if len(ranks) <= MAX_RANKS else f"{shown} and {len(ranks) - MAX_RANKS} others"


def not_asked(ranks: Sequence[int]) -> str:
    """Return the sentence about ranks that are behind.

    >>> not_asked([2]), not_asked([])
    ('; dp_rank 2 did not ask for it', '')
    """
    return f"; dp_rank {named_ranks(ranks)} did not ask for it" if ranks else ""
