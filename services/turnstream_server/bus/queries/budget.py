"""The bytes that a run holds in the store, against its budget and the memory of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from turnstream.store.client import keys
from turnstream.store.client.fullness import FIRST_ESTIMATE, Bytes
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import StoredHash, parsed_number, reading
from turnstream.store.run.configs import read_config


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
    """

    held: HeldBytes
    max_bytes: int
    server_used: int
    server_max: int

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


def read_budget(client: redis.Redis, run: str) -> ByteBudget:
    """Return the bytes of a run and their limits; the parts are read one after the other."""
    _, config = read_config(client, run)
    name = keys.run_keys(run).budget
    with reading(name), translating():
        fields: Any = client.execute_command("HGETALL", name)
        memory: Any = client.info("memory")
    return ByteBudget(
        held=_parse(run, fields),
        max_bytes=config.max_bytes,
        server_used=int(memory.get("used_memory", 0)),
        server_max=int(memory.get("maxmemory", 0)),
    )


async def read_held_async(client: redis.asyncio.Redis, run: str) -> HeldBytes:
    """Return the sums that the scripts keep."""
    name = keys.run_keys(run).budget
    with reading(name), translating():
        fields: Any = await client.execute_command("HGETALL", name)
    return _parse(run, fields)


def parse_held(value: bytes) -> tuple[bool, int]:
    """Return whether the bytes of a trajectory are only reserved, and their number.

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
