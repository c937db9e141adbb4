"""Delivery of the writes of one request: all at once, then those that the store has to decide.

1. Trajectories that are not open here, and whose first turn comes, are opened, by group.
2. All turns and ends are handed to the publisher, which sends them together.
3. Their receipts are awaited.
4. The rest is settled one by one, after the store was read: a repeated write, a trajectory of
   another gateway, and a write of an out-of-date cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import redis.asyncio

from turnstream.errors import (
    ConflictError,
    FencedError,
    InvalidTurnError,
    RejectedError,
    RunNotFoundError,
    StoreBehindError,
    TurnGapError,
    TurnstreamError,
)
from turnstream.generator import AsyncReceipt
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import run_commands_async
from turnstream.store.run.groups import OPEN_GROUP, group_size
from turnstream.types import GroupOpened, TrajectoryKey
from turnstream_server.gateway.rest.ingest.publishers import RunWriter, Slot, Slots
from turnstream_server.gateway.rest.ingest.stored import (
    StoredTrajectory,
    is_open_for,
    read_stored,
)
from turnstream_server.gateway.rest.ingest.writes import IngestWriter, Opening, Write

_PAUSE_AFTER_S: Final = 0.001
"""Time for the writes of one request, after which other requests have their turn."""

_MAX_READS: Final = 16
"""Trajectories that are read from the store at the same time."""

_DECIDED_BY_STORE: Final = (ConflictError, FencedError, TurnGapError, StoreBehindError)
"""Errors that an out-of-date cache may have caused."""


class Outcome(NamedTuple):
    """Why a write was refused, None if it is stored; and the index of the next turn, if known."""

    error: TurnstreamError | None
    next_turn: int | None = None


class _Sent(NamedTuple):
    write: Write
    receipt: AsyncReceipt | None
    next_turn: int


class Delivery:
    """Delivers the writes of one request, whose trajectories are locked."""

    def __init__(self, run_writer: RunWriter, client: redis.asyncio.Redis, slots: Slots) -> None:
        self.run_writer = run_writer
        self._client = client
        self._slots = slots
        self._outcomes: dict[int, Outcome] = {}
        self._refused: dict[TrajectoryKey, TurnstreamError] = {}
        self._undecided: dict[TrajectoryKey, list[Write]] = {}

    async def open_members(
        self, openings: Iterable[Opening]
    ) -> dict[GroupOpened, dict[TrajectoryKey, int] | TurnstreamError]:
        """Open groups and their members, and return the lease epochs of the members by group.

        A member that has ended, or belongs to another writer, has no epoch. A group that is not
        admitted is a RejectedError with `retry_after_s`.
        """
        groups: dict[GroupOpened, dict[TrajectoryKey, None]] = {}
        for group, members in openings:
            groups.setdefault(group, {}).update(dict.fromkeys(members))
        commands = [
            OPEN_GROUP(
                keys.run_keys(self.run_writer.run).of_open_group,
                keys.encode_name(group.group_id),
                group_size(group),
                self.run_writer.writer,
                encode_event(group),
                *map(keys.trajectory_id, members),
            )
            for group, members in groups.items()
        ]
        replies = await run_commands_async(self._client, commands) if commands else []
        opened: dict[GroupOpened, dict[TrajectoryKey, int] | TurnstreamError] = {}
        for (group, members), reply in zip(groups.items(), replies, strict=True):
            if isinstance(reply, RunNotFoundError):
                raise reply
            if isinstance(reply, TurnstreamError):
                opened[group] = reply
                continue
            pairs = zip(members, reply, strict=True)
            epochs = {key: epoch for key, epoch in pairs if isinstance(epoch, int)}
            new = {key: epoch for key, epoch in epochs.items() if not self._slots[key].is_open}
            for writer in self.run_writer.opened(group, new):
                self._slots[writer.key].writer = writer
            opened[group] = epochs
        return opened

    async def open_of_writer(self, members: Sequence[TrajectoryKey]) -> list[TrajectoryKey]:
        """Return the trajectories that are open, and whose lease this writer has."""
        if not members:
            return []
        ledger, ids = keys.run_keys(self.run_writer.run).ledger, map(keys.trajectory_id, members)
        with translating():
            entries: Any = await self._client.execute_command("HMGET", ledger, *ids)
        found, writer = zip(members, entries, strict=True), self.run_writer.writer
        return [key for key, entry in found if is_open_for((entry or b"").decode(), writer)]

    async def deliver(self, writes: Sequence[Write]) -> list[Outcome]:
        """Return the outcome of each write, once the store has acknowledged or refused it.

        RunNotFoundError if the run was deleted; StoreUnavailableError if no group can be opened.
        """
        await self._open_new(writes)
        await self._settle(await self._send(writes))
        await self._decide()
        return [self._outcomes[write.item] for write in writes]

    async def _open_new(self, writes: Sequence[Write]) -> None:
        """Open the trajectories whose first turn is here, with one call per group."""
        openings: list[Opening] = []
        seen: set[TrajectoryKey] = set()
        for write in writes:
            slot = self._slots[write.key]
            if not slot.is_open:
                slot.writer = None
                if write.key not in seen and write.can_open:
                    assert write.group is not None
                    openings.append(Opening(write.group, [write.key]))
            seen.add(write.key)
        opened = await self.open_members(openings)
        for group, (key,) in openings:
            if isinstance(error := opened[group], TurnstreamError):
                self._refused[key] = error

    async def _send(self, writes: Sequence[Write]) -> list[_Sent]:
        """Hand all writes that follow the cached turns to the publisher; return their receipts."""
        sent: list[_Sent] = []
        clock = asyncio.get_running_loop().time
        pause_s = clock() + _PAUSE_AFTER_S
        for write in writes:
            if (done := await self._send_one(write)) is not None:
                sent.append(done)
            if clock() >= pause_s:
                await asyncio.sleep(0)
                pause_s = clock() + _PAUSE_AFTER_S
        return sent

    async def _send_one(self, write: Write) -> _Sent | None:
        writer, refused = self._slots[write.key].writer, self._refused.get(write.key)
        if refused is not None and not isinstance(refused, ConflictError):
            self._outcomes[write.item] = Outcome(refused)
            return None
        if writer is None or write.key in self._undecided or not _follows(write, writer):
            self._undecided.setdefault(write.key, []).append(write)
            return None
        try:
            _check_size(write, writer)
            return _Sent(write, await _sent(writer, write), writer.num_turns)
        except RejectedError:
            self._undecided.setdefault(write.key, []).append(write)
        except TurnstreamError as error:
            self._outcomes[write.item] = Outcome(error, writer.num_turns)
        return None

    async def _settle(self, sent: Sequence[_Sent]) -> None:
        """Wait for the receipts; writes that an out-of-date cache may have spoilt are undecided."""
        failed: dict[TrajectoryKey, list[Write]] = {}
        for write, receipt, next_turn in sent:
            try:
                if receipt is not None:
                    await receipt
            except _DECIDED_BY_STORE:
                failed.setdefault(write.key, []).append(write)
            except TurnstreamError as error:
                self._outcomes[write.item] = Outcome(error)
            else:
                self._outcomes[write.item] = Outcome(None, next_turn)
        for key, writes in failed.items():
            self._undecided[key] = [*writes, *self._undecided.get(key, ())]

    async def _decide(self) -> None:
        """Settle the undecided writes, several trajectories at the same time."""
        places = asyncio.Semaphore(_MAX_READS)

        async def decide(slot: Slot, writes: Sequence[Write]) -> None:
            async with places:
                for write in writes:
                    self._outcomes[write.item] = await self._decided(slot, write)

        async with asyncio.TaskGroup() as tasks:
            for key, writes in self._undecided.items():
                tasks.create_task(decide(self._slots[key], writes))

    async def _decided(self, slot: Slot, write: Write) -> Outcome:
        """Return the outcome of a write of a trajectory, from what the store has."""
        next_turn = None
        try:
            stored = await self._read(slot, write)
            next_turn = len(stored.turns)
            return Outcome(None, await self._write(slot.writer, stored, write))
        except TurnstreamError as error:
            return Outcome(error, next_turn)

    async def _read(self, slot: Slot, write: Write) -> StoredTrajectory:
        """Return what the store has of a trajectory, which is adopted if it is open."""
        run = self.run_writer.run
        stored = await read_stored(self._client, run, slot.key)
        if slot.writer is not None and not self._is_current(slot.writer, stored):
            slot.drop()
        if stored.is_open and slot.writer is None:
            slot.writer = await self._adopted(slot.key)
            stored = await read_stored(self._client, run, slot.key)
        if stored.is_known:
            return stored
        raise self._refused.get(slot.key) or _not_open(write)

    def _is_current(self, writer: IngestWriter, stored: StoredTrajectory) -> bool:
        """Whether a cached writer is up to date: no other gateway or writer has written since."""
        is_usable = writer.error is None and not writer.has_ended
        is_same = writer.num_turns == len(stored.turns)
        return is_usable and is_same and is_open_for(stored.entry, self.run_writer.writer)

    async def _adopted(self, key: TrajectoryKey) -> IngestWriter | None:
        """Return the writer of an open trajectory; None if it ended in between."""
        try:
            return await self.run_writer.adopt_key(key)
        except ConflictError as error:
            stored = await read_stored(self._client, self.run_writer.run, key)
            if error.retry_after_s is not None or stored.is_open:
                raise
            return None

    async def _write(
        self, writer: IngestWriter | None, stored: StoredTrajectory, write: Write
    ) -> int:
        """Carry out the part of a write that is not stored; return the index of the next turn."""
        num_turns = len(stored.turns)
        if write.abandon_reason is not None and stored.is_abandoned:
            return num_turns
        if writer is not None:
            _check_size(write, writer)
        declared = await self.run_writer.columns()
        write = stored.without_repeated(write, declared)
        if write.first is not None and write.first > num_turns:
            if writer is None:
                raise stored.ended(f"turn {write.first}")
            raise TurnGapError(
                f"turn {write.first} of {write.key.readable_name} does not follow: the next turn "
                f"is turn {num_turns}"
            )
        num_known = stored.check_same(write, declared)
        if writer is not None:
            if (receipt := await _sent(writer, write, num_known=num_known)) is not None:
                await receipt
            num_turns = writer.num_turns
        elif num_known < len(write.turns):
            raise stored.ended(f"turn {num_turns}")
        else:
            stored.check_same_end(write, declared)
        return num_turns if write.first is None else write.first + len(write.turns)


async def _sent(writer: IngestWriter, write: Write, *, num_known: int = 0) -> AsyncReceipt | None:
    """Hand a write without its first turns to the publisher; return the receipt of its last part.

    The parts of a trajectory are acknowledged in order. There is no receipt if there is no part.
    """
    receipt: AsyncReceipt | None = None
    for number, turn in enumerate(write.turns[num_known:], num_known + 1):
        is_last = write.state != "open" and number == len(write.turns)
        receipt = await writer.add(turn, is_last=is_last)
    if write.seal is not None:
        receipt = await writer.finish(write.seal)
    elif write.abandon_reason is not None:
        receipt = writer.abandon(write.abandon_reason)
    return receipt


def _follows(write: Write, writer: IngestWriter) -> bool:
    """Whether a write follows the cached turns; one without a turn and an end is for the store."""
    if write.first is None:
        return write.seal is not None or write.abandon_reason is not None
    return write.first == writer.num_turns


def _check_size(write: Write, writer: IngestWriter) -> None:
    if write.group is not None and write.group.num_samples != writer.num_samples:
        raise ConflictError(
            f"group {write.key.group_id} was opened with {writer.num_samples} samples, not "
            f"{write.group.num_samples}"
        )


def _not_open(write: Write) -> TurnstreamError:
    """Return the error of a write to a trajectory that the store does not have."""
    name = write.key.readable_name
    if write.first == 0 and write.group is None:
        return InvalidTurnError("num_samples", f"is missing, and {name} is not open")
    if write.first is None:
        return ConflictError(f"{name} was never opened, or is finished")
    return TurnGapError(f"turn {write.first} of {name} does not follow: the next turn is turn 0")
