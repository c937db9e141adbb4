"""Whether a store is full: bytes used and allowed, and what holds them. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

RESERVE: Final = 0.2
"""The share of the server's memory that takes no new group; see open_group.lua."""

LEAST_ESTIMATE: Final = 16_384  # see open_group.lua

FIRST_ESTIMATE: Final = 65_536
"""Bytes of a trajectory, before any is sealed; see open_group.lua."""


def store_trouble(facts: Mapping[str, Any]) -> str:
    """Return why a store refuses writes now; empty if it takes them.

    Full memory does not count: producers wait, and calls that free memory are not refused.

    Args:
        facts: the reply to INFO, by name.

    >>> store_trouble({"loading": 0, "aof_last_write_status": "ok"})
    ''
    >>> store_trouble({"loading": 0, "aof_last_write_status": "err"})
    'the store refuses writes: its last write to the disk failed'
    >>> store_trouble({"loading": 1})
    'the store is loading its data'
    """
    if int(facts.get("loading", 0)):
        return "the store is loading its data"
    if facts.get("aof_last_write_status", "ok") != "ok":
        return "the store refuses writes: its last write to the disk failed"
    return ""


class Bytes(NamedTuple):
    """Bytes of a server and of one run, at one time.

    Attributes:
        used: bytes that the server uses.
        allowed: its `maxmemory`; 0 for no limit.
        reserved: held by open trajectories of the run.
        stored: held by sealed trajectories that are in no batch.
        planned: held by the batches of the run.
        needed: bytes of the next group.
        max_bytes: the setting of the run; 0 for no limit.
    """

    used: int
    allowed: int
    reserved: int
    stored: int
    planned: int
    needed: int = 0
    max_bytes: int = 0

    @property
    def refuses_writes(self) -> bool:
        """Whether the server has no memory left."""
        return 0 < self.allowed <= self.used

    @property
    def held(self) -> int:
        """Bytes of the run."""
        return self.reserved + self.stored + self.planned

    def why_full(self, *, is_urgent: bool) -> str:
        """Return that the store refuses writes, or that open trajectories hold the free bytes.

        Empty where neither holds. Open trajectories count where they hold more than half of what is
        held, or of the memory for new groups: steps of the trainer release none of their bytes.

        Args:
            is_urgent: the trainer waits for groups, and may have more: see open_group.lua.

        >>> Bytes(120, 100, 90, 10, 0).why_full(is_urgent=True).partition(";")[0]
        'the store is full: it uses 120 bytes, maxmemory is 100, and it refuses writes'
        """
        if self.refuses_writes:
            return (
                f"the store is full: it uses {self.used:,} bytes, maxmemory is {self.allowed:,}, "
                f"and it refuses writes; this run holds {self._holders}: raise maxmemory, or "
                "abandon open trajectories"
            )
        if self._is_over_budget(is_urgent=is_urgent) and 2 * self.reserved > self.held:
            return (
                f"the byte budget of the run is full: {self._budget}: seal or abandon open "
                "trajectories, or revise max_bytes"
            )
        usable = self._usable(is_urgent=is_urgent)
        if self._is_over_memory(usable) and 2 * self.reserved > usable:
            return (
                f"the store is full: it uses {self.used:,} of {self.allowed:,} bytes, of which new "
                f"groups may have {usable:,.0f}; {self._need}: seal or abandon open trajectories, "
                "or raise maxmemory"
            )
        return ""

    def why_group_waits(self, *, is_urgent: bool) -> str:
        """Return why the next group waits for bytes; empty if it may start.

        For a trainer that starves, groups start beyond `max_bytes`, and in half of the server's
        reserve: see open_group.lua.

        >>> Bytes(0, 0, 0, 40, 50, needed=20, max_bytes=100).why_group_waits(is_urgent=True)
        ''
        """
        if self._is_over_budget(is_urgent=is_urgent):
            return (
                f"{self._budget}; a step releases its bytes when it is committed and no longer "
                "retained"
            )
        if self._is_over_memory(self._usable(is_urgent=is_urgent)):
            return f"the server uses {self.used:,} of its {self.allowed:,} bytes; {self._need}"
        return ""

    @property
    def _holders(self) -> str:
        return (
            f"{self.reserved:,} bytes by open trajectories, {self.stored:,} by sealed ones, "
            f"{self.planned:,} by planned steps"
        )

    @property
    def _budget(self) -> str:
        held = f"{self.held:,} of max_bytes={self.max_bytes:,} are held"
        return f"{held}, {self._holders}; a group needs {self.needed:,}"

    @property
    def _need(self) -> str:
        return f"this run holds {self._holders}; a group needs {self.needed:,}"

    def _usable(self, *, is_urgent: bool) -> float:
        return self.allowed * (1 - (RESERVE / 2 if is_urgent else RESERVE))

    def _is_over_budget(self, *, is_urgent: bool) -> bool:
        return 0 < self.max_bytes < self.held + self.needed and not is_urgent

    def _is_over_memory(self, usable: float) -> bool:
        return 0 < usable < self.used + self.reserved + self.needed
