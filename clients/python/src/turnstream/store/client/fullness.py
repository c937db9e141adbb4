"""Whether a store is full: bytes used and allowed, and what holds them. No I/O."""

from __future__ import annotations

from typing import Final, NamedTuple

RESERVE: Final = 0.2
"""The share of the server's memory that takes no new group; see open_group.lua."""

LEAST_ESTIMATE: Final = 16_384  # see open_group.lua


class Bytes(NamedTuple):
    """Bytes of a server and of one run, as of one moment.

    Attributes:
        used: bytes that the server uses.
        allowed: its `maxmemory`; 0 for no limit.
        reserved: held by open trajectories of the run.
        stored: held by sealed trajectories that are in no batch.
        planned: held by the batches of the run.
        needed: bytes of the group that is to begin next.
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
    def by(self) -> str:
        """The holders, by type."""
        return (
            f"{self.reserved:,} bytes by open trajectories, {self.stored:,} by sealed ones, "
            f"{self.planned:,} by planned steps"
        )

    def why_full(self, *, is_urgent: bool) -> str:
        """Return that the store refuses writes, or that open trajectories leave no room.

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
                f"and it refuses writes; this run holds {self.by}: raise maxmemory, or abandon "
                "open trajectories"
            )
        held = self.reserved + self.stored + self.planned
        is_over_budget = 0 < self.max_bytes < held + self.needed and not is_urgent
        if is_over_budget and 2 * self.reserved > held:
            return (
                f"the byte budget of the run is full: {held:,} of max_bytes={self.max_bytes:,} are "
                f"held, {self.by}; a group needs {self.needed:,}: seal or abandon open "
                "trajectories, or revise max_bytes"
            )
        usable = self.allowed * (1 - (RESERVE / 2 if is_urgent else RESERVE))
        is_over_memory = 0 < usable < self.used + self.reserved + self.needed
        if is_over_memory and 2 * self.reserved > usable:
            return (
                f"the store is full: it uses {self.used:,} of {self.allowed:,} bytes, of which new "
                f"groups may have {usable:,.0f}; this run holds {self.by}; a group needs "
                f"{self.needed:,}: seal or abandon open trajectories, or raise maxmemory"
            )
        return ""
