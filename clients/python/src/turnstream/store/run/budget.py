"""Bytes of trajectories: reserved when their group is opened, and topped up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from turnstream.errors import RecordError
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.store.client.scripts import Argument, Command, Script
from turnstream.types import SealedTrajectory

FIRST_BYTES: Final = 12_288
"""Bytes of records in every reservation that group_admission.lua makes."""

_LEAST_BLOCK: Final = 16_384
_LARGEST_BLOCK: Final = 1 << 20

RESERVE = Script("reserve", "turnstream.store.run")


def reserve_command(run: str, wanted: Sequence[tuple[str, int, int]], *, writer: str) -> Command:
    """Return the call that tops up reservations: (id, lease epoch, bytes) of each."""
    names = keys.run_keys(run)
    arguments: list[Argument] = []
    for trajectory_id, epoch, num_bytes in wanted:
        arguments += (trajectory_id, f"{epoch}:{writer}", num_bytes)
    return RESERVE((names.ledger, names.payload_bytes, names.budget), *arguments)


def with_block(num_bytes: int) -> int:
    """Return the reservation for a growing trajectory: as much again, within bounds.

    >>> with_block(20_000), with_block(1_000), with_block(10 << 20) >> 20
    (40000, 17384, 11)
    """
    return num_bytes + min(max(num_bytes, _LEAST_BLOCK), _LARGEST_BLOCK)


def settled_lease(epoch: int, writer: str, *, awaits_reward: bool, num_bytes: int | None) -> str:
    """Return lease and size of a sealed trajectory for the script post_sealed.

    >>> settled_lease(2, "gpu7", awaits_reward=True, num_bytes=500)
    '2:awaits/500:gpu7'
    >>> settled_lease(2, "gpu7", awaits_reward=False, num_bytes=None)
    '2::gpu7'
    """
    size = "" if num_bytes is None else f"/{num_bytes}"
    words = f"{epoch}:{'awaits' if awaits_reward else ''}{size}"
    return f"{words}:{writer}" if writer else words


def lease_of_seal(epoch: int, writer: str, seal: bytes) -> str:
    """Return the same for a stored seal, whose writer is gone."""
    awaits_reward, num_bytes = facts_of_seal(seal)
    return settled_lease(epoch, writer, awaits_reward=awaits_reward, num_bytes=num_bytes)


def facts_of_seal(seal: bytes) -> tuple[bool, int | None]:
    """Return whether a stored seal awaits a reward, and the bytes of all records.

    An unreadable seal has no size. It is posted as it is, so that the planner rejects it.
    """
    try:
        event = decode_event(seal)
    except RecordError:
        event = None
    if not isinstance(event, SealedTrajectory):
        return False, None
    return event.awaits_reward, event.num_payload_bytes + len(seal)
