"""Stored trajectories, with which a repeated write is compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import redis.asyncio

from turnstream.errors import ConflictError, FencedError, ReleasedError, TurnstreamError
from turnstream.generator.api.work import adopted_turns
from turnstream.generator.encode.encoder import TrajectoryDraft
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.types import DeclaredColumn, SealedTrajectory, TrajectoryKey
from turnstream_server.gateway.rest.ingest.writes import Write


def is_open_for(entry: str, writer: str) -> bool:
    """Return whether a ledger entry is that of an open trajectory of a writer.

    >>> is_open_for("open:1:generator-7", "generator-7"), is_open_for("sealed:1", "generator-7")
    (True, False)
    """
    return entry.startswith("open:") and entry.split(":", 2)[2] == writer


class StoredTrajectory(NamedTuple):
    """A trajectory as the store has it.

    Attributes:
        entry: its entry in the ledger, as "sealed:1"; "" if there is none.
        turns: records of its turns, in order.
        seal: record of its seal; None without one.
        released: why its payload is gone, "abandoned" or another reason; "" while it is there.
    """

    key: TrajectoryKey
    entry: str
    turns: Sequence[bytes]
    seal: bytes | None
    released: str

    @property
    def state(self) -> str:
        """Return its state in the ledger; "unknown" if it has no entry."""
        return self.entry.partition(":")[0] or "unknown"

    @property
    def is_open(self) -> bool:
        """Whether a writer may continue it."""
        return self.state == "open"

    @property
    def is_abandoned(self) -> bool:
        """Whether it was abandoned."""
        return "abandoned" in (self.state, self.released)

    @property
    def is_known(self) -> bool:
        """Whether the store has anything of it."""
        return bool(self.entry or self.turns or self.released)

    def ended(self, what: str) -> TurnstreamError:
        """Return the error of a write that cannot follow; `what` names it, as in "turn 3"."""
        name, reason = self.key.readable_name, self.entry.partition(":")[2]
        if self.is_abandoned:
            return FencedError(f"{name} was abandoned: {reason or 'its payload is released'}")
        if self.released or not (self.turns or self.seal):
            message = f"{name} is finished, and its payload is released: {what} is not compared"
            return ReleasedError(message)
        after = f"after {len(self.turns)} turns"
        return ConflictError(f"{name} is already {self.state} {after}: {what} cannot follow")

    def without_repeated(self, write: Write, declared: Sequence[DeclaredColumn]) -> Write:
        """Return the write without its first turns whose call ids are stored, at any index.

        ConflictError if such a turn is stored with another prompt or response.
        """
        if not (write.turns and write.turns[0].turn.call_id):
            return write
        draft = self._draft(len(self.turns), declared)
        first, turns = write.first, [*write.turns]
        while turns and draft.is_repeated(turns[0].turn):
            first = draft.call_ids[turns.pop(0).turn.call_id or ""] + 1
        return replace(write, first=first, turns=turns)

    def check_same(self, write: Write, declared: Sequence[DeclaredColumn]) -> int:
        """Return how many turns of a write are stored; ConflictError for another content.

        A record is a function of the turns so far, so equal records are equal turns.
        """
        first = write.first or 0
        num_known = max(0, min(len(self.turns) - first, len(write.turns)))
        draft = self._draft(first if num_known else 0, declared)
        for index, turn in enumerate(write.turns[:num_known], first):
            made = draft.add(turn.checked(declared))
            if made.record != self.turns[index]:
                name = self.key.readable_name
                raise ConflictError(f"turn {index} of {name} is stored with another content")
        num_turns = first + len(write.turns)
        if write.seal is not None and write.first is not None and num_turns < len(self.turns):
            raise ConflictError(
                f"{write.key.readable_name} has {len(self.turns)} turns, and the seal comes after "
                f"{num_turns}"
            )
        return num_known

    def check_same_end(self, write: Write, declared: Sequence[DeclaredColumn]) -> None:
        """Refuse an end that a finished trajectory does not have, or a renewal of its lease."""
        if write.seal is None:
            if write.abandon_reason is not None:
                raise self.ended("its abandonment")
            if write.first is None:
                raise self.ended("a renewal of its lease")
            return
        if self.seal is None:
            raise self.ended("the seal")
        sealed = decode_event(self.seal)
        assert isinstance(sealed, SealedTrajectory)
        drafted = self._draft(len(self.turns), declared).seal(**write.seal._asdict())
        if drafted.make(sealed.lease_epoch) != self.seal:
            raise ConflictError(f"{self.key.readable_name} is sealed with another content")

    def _draft(self, num_turns: int, declared: Sequence[DeclaredColumn]) -> TrajectoryDraft:
        """Return a draft with the first stored turns."""
        draft = TrajectoryDraft(self.key, extra_columns=declared)
        for each in adopted_turns(self.turns[:num_turns], declared):
            draft.restore(each.turn, each.stored)
        return draft


async def read_stored(
    client: redis.asyncio.Redis, run: str, key: TrajectoryKey
) -> StoredTrajectory:
    """Return what the store has of a trajectory."""
    name = keys.trajectory_id(key)
    payload = keys.trajectory_keys(run, name)
    pipeline = client.pipeline(transaction=False)
    pipeline.execute_command("HGET", keys.run_keys(run).ledger, name)
    pipeline.execute_command("HMGET", payload.meta, "sealed", "released")
    pipeline.execute_command("XRANGE", payload.turns, "-", "+")
    with translating():
        reply: Any = await pipeline.execute()
    entry, (sealed, released), entries = reply
    records = [fields[b"r"] for _, fields in entries]
    seal = records.pop() if sealed == b"1" and records else None
    return StoredTrajectory(key, (entry or b"").decode(), records, seal, (released or b"").decode())
