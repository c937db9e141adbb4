"""The bytes that a run holds in the store, against its budget and the memory of the server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import redis
import redis.asyncio

from turnstream.store.client import keys
from turnstream.store.client.fullness import RESERVE, Bytes
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import StoredHash, parsed_number, reading
from turnstream.store.run.configs import read_config
from turnstream_server.bus.core.frontier import Frontier, read_frontier
from turnstream_server.bus.sessions.observers import Observer, read_observers

FIRST_ESTIMATE: Final = 65_536
"""Bytes of a trajectory, before any is sealed; see open_group.lua."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """The bytes of a run's trajectories at one time.

    Attributes:
        reserved: for unsealed trajectories: open, not opened, or ended and not released.
        stored: bytes of sealed trajectories that are in no batch.
        planned: bytes of the batches that are not released.
        estimate: usual bytes of a trajectory.
    """

    reserved: int
    stored: int
    planned: int
    estimate: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.reserved + self.stored + self.planned


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteBudget:
    """The bytes of a run, and their limits.

    Attributes:
        max_bytes: limit of the run; 0 for none.
        server_used: bytes that the server uses.
        server_max: bytes that it may use; 0 for no limit.
        num_kept_steps: planned steps whose payload is kept.
        unseen_by: the observers that have not seen the oldest committed one of them.
    """

    held: HeldBytes
    max_bytes: int
    server_used: int
    server_max: int
    num_kept_steps: int
    unseen_by: str = ""

    @property
    def bytes(self) -> Bytes:
        """Bytes used and allowed, and what holds them."""
        return Bytes(
            used=self.server_used,
            allowed=self.server_max,
            reserved=self.held.reserved,
            stored=self.held.stored,
            planned=self.held.planned,
            needed=self.held.estimate,
            max_bytes=self.max_bytes,
        )

    def why_full(self, *, is_urgent: bool) -> str:
        """Why no group of the usual size may begin now; empty if one may.

        For a trainer that starves, groups begin beyond `max_bytes`, and in half of the server's
        reserve: see open_group.lua.
        """
        held = self.held
        by = (
            f"{held.reserved:,} by open trajectories, {held.stored:,} by sealed ones, "
            f"{held.planned:,} by the {self.num_kept_steps} steps that are kept"
        )
        if 0 < self.max_bytes < held.total + held.estimate and not is_urgent:
            return (
                f"generators wait for bytes: {held.total:,} of max_bytes={self.max_bytes:,} are "
                f"held, {by}; steps make room as they are committed and fall behind the retained "
                "checkpoints"
            )
        usable = (1 - (RESERVE / 2 if is_urgent else RESERVE)) * self.server_max
        if 0 < usable < self.server_used + held.reserved + held.estimate:
            return (
                f"generators wait for memory of the server: it uses {self.server_used:,} of "
                f"{self.server_max:,} bytes; this run holds {held.total:,}, {by}"
            )
        return ""

    @property
    def why_too_small(self) -> str:
        """Why the budget cannot be kept; empty if it can, as far as that is known."""
        if not 0 < self.max_bytes < self.held.planned:
            return ""
        return (
            f"max_bytes={self.max_bytes:,} is less than the {self.num_kept_steps} steps take that "
            f"are kept, {self.held.planned:,}: the run goes on above it, step by step. Raise it; "
            "steps go once they are committed, behind the retained checkpoints, archived where "
            "that is asked for, and seen by every observer"
            f"{': ' + self.unseen_by if self.unseen_by else ''}"
        )


def read_budget(client: redis.Redis, run: str) -> ByteBudget:
    """Return the bytes of a run and their limits; the parts are read one after the other."""
    _, config = read_config(client, run)
    frontier = read_frontier(client, run)
    name = keys.run_keys(run).budget
    with reading(name), translating():
        fields: Any = client.execute_command("HGETALL", name)
        memory: Any = client.info("memory")
    return ByteBudget(
        held=_parse(run, fields),
        max_bytes=config.max_bytes,
        server_used=int(memory.get("used_memory", 0)),
        server_max=int(memory.get("maxmemory", 0)),
        num_kept_steps=frontier.planned - frontier.released,
        unseen_by=_unseen_by(read_observers(client, run), frontier),
    )


def _unseen_by(observers: Iterable[Observer], frontier: Frontier) -> str:
    """Return the observers that alone keep the oldest step from its release."""
    if frontier.released >= frontier.committed:
        return ""
    return ", ".join(
        f"{each.name!r} has seen step {each.seen}, and is forgotten in {each.left_s:.0f} s"
        for each in observers
        if each.left_s > 0 and each.seen <= frontier.released
    )


async def read_held_async(client: redis.asyncio.Redis, run: str) -> HeldBytes:
    """The sums that the scripts keep."""
    name = keys.run_keys(run).budget
    with reading(name), translating():
        fields: Any = await client.execute_command("HGETALL", name)
    return _parse(run, fields)


def parse_held(value: bytes) -> tuple[bool, int]:
    """Whether the bytes of a trajectory are only reserved, and how many they are.

    >>> parse_held(b"r65536"), parse_held(b"9000")
    ((True, 65536), (False, 9000))
    """
    return value.startswith(b"r"), parsed_number(value.removeprefix(b"r"))


def _parse(run: str, fields: dict[bytes, bytes]) -> HeldBytes:
    stored = StoredHash(keys.run_keys(run).budget, fields)
    return HeldBytes(
        reserved=stored.parsed("reserved", parsed_number, 0),
        stored=stored.parsed("stored", parsed_number, 0),
        planned=stored.parsed("planned", parsed_number, 0),
        estimate=stored.parsed("estimate", parsed_number, FIRST_ESTIMATE),
    )
