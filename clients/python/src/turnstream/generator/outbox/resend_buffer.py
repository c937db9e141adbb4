"""Acknowledged writes that the store may still lose, kept to be sent again. No I/O, no clock.

A store that does not sync before it answers loses its last writes in a power cut. After a restart
everything that is kept is sent again; the store answers surviving writes as duplicates.

A write is *proven* when the same server instance still answers `keep_s` seconds after it: by then
the write is synced.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from turnstream.generator.encode.encoder import TurnRecord
from turnstream.generator.outbox.calls import CloseCall, RewardCall
from turnstream.generator.outbox.trajectory_queue import Admission, Lane
from turnstream.types import TrajectoryKey

KEEP_S = 5.0
"""The store syncs every second, and postpones a write for up to two more while its disk is slow."""

MAX_KEPT_BYTES = 64 * 1024 * 1024


class KeptTurn(NamedTuple):
    """A turn that the store has acknowledged."""

    lane: Lane
    turn: TurnRecord


class TakenOver(NamedTuple):
    """A trajectory was taken over."""

    lane: Lane


class Ended(NamedTuple):
    """The seal of a trajectory was stored or posted, or it was abandoned."""

    lane: Lane


Acknowledged = Admission | TakenOver | KeptTurn | Ended | CloseCall | RewardCall


class _Kept(NamedTuple):
    acknowledged_s: float
    num_bytes: int
    what: Acknowledged


class ResendBuffer:
    """The newest acknowledged writes of one publisher, in the order of their answers.

    Args:
        keep_s: time in which the store syncs acknowledged writes; 0 keeps nothing.
        max_bytes: limit of the kept turns; the oldest are dropped first.

    Attributes:
        is_needed: whether the store answers before it syncs.
        num_bytes: bytes of the kept turns.
        num_forgotten: turns dropped before they were proven, for lack of space.
    """

    def __init__(self, *, keep_s: float, max_bytes: int) -> None:
        self.is_needed = True
        self.keep_s = keep_s
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_forgotten = 0
        self._kept: deque[_Kept] = deque()
        self._opened: dict[TrajectoryKey, Lane] = {}  # by the openings that are kept
        self._newest_s: float | None = None

    @property
    def is_settled(self) -> bool:
        """Whether all that was acknowledged is proven."""
        return self._newest_s is None

    def keep(self, what: Acknowledged, *, now_s: float) -> None:
        """The store has acknowledged this."""
        if not self.is_needed or self.keep_s <= 0:
            return
        num_bytes = len(what.turn.record) if isinstance(what, KeptTurn) else 0
        self._kept.append(_Kept(now_s, num_bytes, what))
        if isinstance(what, Admission):
            self._opened.update((lane.key, lane) for lane in what.lanes)
        self._newest_s = now_s
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_forgotten += isinstance(self._forget().what, KeptTurn)

    def prove(self, alive_s: float) -> None:
        """The store that acknowledged all this was alive at this time, or later."""
        while self._kept and self._kept[0].acknowledged_s + self.keep_s <= alive_s:
            self._forget()
        if self._newest_s is not None and self._newest_s + self.keep_s <= alive_s:
            self._newest_s = None

    def pause_s(self, now_s: float) -> float | None:
        """Seconds until an answer of the store proves everything; None if everything is proven."""
        return None if self._newest_s is None else max(0.0, self._newest_s + self.keep_s - now_s)

    def has_opened(self, key: TrajectoryKey) -> bool:
        """Whether the opening of a trajectory is kept that has not failed."""
        lane = self._opened.get(key)
        return lane is not None and lane.error is None

    def take(self) -> list[Acknowledged]:
        """All that is kept; it is to be sent again, and kept no longer."""
        taken = [each.what for each in self._kept]
        self._kept.clear()
        self._opened.clear()
        self.num_bytes, self._newest_s = 0, None
        return taken

    def statistics(self) -> dict[str, int]:
        """Return the counts by their names in PublisherStatistics."""
        return {
            "num_forgotten": self.num_forgotten,
            "kept_bytes": self.num_bytes,
            "max_kept_bytes": self.max_bytes,
        }

    def _forget(self) -> _Kept:
        forgotten = self._kept.popleft()
        self.num_bytes -= forgotten.num_bytes
        if isinstance(forgotten.what, Admission):
            for lane in forgotten.what.lanes:
                if self._opened.get(lane.key) is lane:
                    del self._opened[lane.key]
        return forgotten
