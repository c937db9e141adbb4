"""Whether a store is full: bytes used and allowed, and what holds them. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from turnstream.store.client.stored_values import StoredHash, parsed_number

RESERVE: Final = 0.2
"""The share of the server's memory that takes no new group; see group_admission.lua."""

LEAST_ESTIMATE: Final = 16_384  # see group_admission.lua

FIRST_ESTIMATE: Final = 65_536
"""Bytes of a trajectory, before any is sealed; see group_admission.lua."""


def store_trouble(facts: Mapping[str, Any]) -> str:
    """Return why a store refuses or loses writes now; empty if it keeps them.

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
    if not int(facts.get("aof_enabled", 1)):
        return "the store keeps no append-only file: set its appendonly to yes"
    if facts.get("aof_last_write_status", "ok") != "ok":
        return "the store refuses writes: its last write to the disk failed"
    return ""


class Shortage(NamedTuple):
    """The lack of bytes for a group; it is full if steps of the trainer cannot end it."""

    is_full: bool
    why: str


class Bytes(NamedTuple):
    """Bytes of a server and of one run, at one time.

    Attributes:
        used: bytes that the server uses.
        allowed: its `maxmemory`; 0 for no limit.
        reserved: held by open trajectories of the run.
        stored: held by sealed trajectories that are in no batch.
        planned: held by the batches of the run.
        needed: bytes of the next group, or usual bytes of a trajectory.
    """

    used: int = 0
    allowed: int = 0
    reserved: int = 0
    stored: int = 0
    planned: int = 0
    needed: int = FIRST_ESTIMATE
    max_bytes: int = 0

    @property
    def held(self) -> int:
        """Bytes of the run."""
        return self.reserved + self.stored + self.planned

    @property
    def why_refused(self) -> str:
        """Why the server refuses writes; empty if it has memory left.

        >>> Bytes(120, 100, 90, 10, 0).why_refused.partition(";")[0]
        'the store is full: it uses 120 bytes, maxmemory is 100, and it refuses writes'
        """
        if not 0 < self.allowed <= self.used:
            return ""
        return (
            f"the store is full: it uses {self.used:,} bytes, maxmemory is {self.allowed:,}, "
            f"and it refuses writes; this run holds {self._holders}: raise maxmemory, or abandon "
            "open trajectories"
        )

    @property
    def why_full(self) -> str:
        """Why steps of the trainer cannot free the missing bytes; empty if they can."""
        shortage = self.shortage(is_urgent=False)
        return shortage.why if shortage is not None and shortage.is_full else ""

    def of_group(self, num_samples: int) -> Bytes:
        """Return the same with the need of a group; `needed` is that of a trajectory here."""
        return self._replace(needed=num_samples * max(LEAST_ESTIMATE, self.needed))

    def shortage(self, *, is_urgent: bool) -> Shortage | None:
        """Return why the next group waits for bytes, or None.

        For a trainer that starves, groups start beyond `max_bytes`, and in half of the server's
        reserve: see group_admission.lua. The shortage is full where open trajectories hold more
        than half, since steps of the trainer release none of their bytes.

        >>> bytes_ = Bytes(0, 0, 0, 40, 50, needed=20, max_bytes=100)
        >>> bytes_.shortage(is_urgent=True), bytes_.shortage(is_urgent=False).is_full
        (None, False)
        """
        if self.why_refused:
            return Shortage(is_full=True, why=self.why_refused)
        usable = self.allowed * (1 - (RESERVE / 2 if is_urgent else RESERVE))
        found: list[Shortage] = []
        if 0 < self.max_bytes < self.held + self.needed and not is_urgent:
            found.append(self._shortage_of_budget())
        if 0 < usable < self.used + self.reserved + self.needed:
            found.append(self._shortage_of_memory(usable))
        return max(found, key=lambda each: each.is_full, default=None)

    def _shortage_of_budget(self) -> Shortage:
        why = (
            f"{self.held:,} of max_bytes={self.max_bytes:,} are held, {self._holders}; a group "
            f"needs {self.needed:,}"
        )
        if 2 * self.reserved > self.held:
            remedy = "seal or abandon open trajectories, or revise max_bytes"
            return Shortage(True, f"the byte budget of the run is full: {why}: {remedy}")
        remedy = "a step releases its bytes when it is committed and no longer retained"
        return Shortage(False, f"{why}; {remedy}")

    def _shortage_of_memory(self, usable: float) -> Shortage:
        why = (
            f"uses {self.used:,} of {self.allowed:,} bytes, of which new groups may have "
            f"{usable:,.0f}; this run holds {self._holders}; a group needs {self.needed:,}"
        )
        if 2 * self.reserved <= usable:
            return Shortage(False, f"the server {why}")
        remedy = "seal or abandon open trajectories, or raise maxmemory"
        return Shortage(True, f"the store is full: it {why}: {remedy}")

    @property
    def _holders(self) -> str:
        return (
            f"{self.reserved:,} bytes by open trajectories, {self.stored:,} by sealed ones, "
            f"{self.planned:,} by planned steps"
        )


NO_BYTES: Final = Bytes()


def parse_bytes(budget: StoredHash, *, used: int, allowed: int, max_bytes: int = 0) -> Bytes:
    """Return the bytes of a run from its key `budget`; `needed` is that of a trajectory."""
    return Bytes(
        used=used,
        allowed=allowed,
        reserved=budget.number("reserved"),
        stored=budget.number("stored"),
        planned=budget.number("planned"),
        needed=budget.parsed("estimate", parsed_number, FIRST_ESTIMATE),
        max_bytes=max_bytes,
    )
