"""The trajectory of one session: opened by its first model call, written turn by turn, and ended.

All of its state is in the store. A gateway that has not seen the session adopts the trajectory
under the same writer name. Where two gateways write at once, one of them reads again, numbers its
turns again and repeats. The call id of a turn says whether it is stored already.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import redis.asyncio

from turnstream.errors import ConflictError, FencedError, TurnGapError, TurnstreamError
from turnstream.records.turns import decode_turn
from turnstream.types import GroupOpened
from turnstream_server.gateway.proxy.call_ids import superseded_turns
from turnstream_server.gateway.rest.ingest.delivery import Delivery
from turnstream_server.gateway.rest.ingest.publishers import Publishers, RunWriter, Slot
from turnstream_server.gateway.rest.ingest.stored import StoredTrajectory, read_stored
from turnstream_server.gateway.rest.ingest.writes import (
    IngestWriter,
    Opening,
    Seal,
    Write,
    WrittenTurn,
)
from turnstream_server.keys.sessions import Session, SessionKeys

_MAX_TRIES: Final = 5
"""Times for which turns are numbered again, because another gateway wrote in between."""

_WRITTEN_ELSEWHERE: Final = (ConflictError, FencedError, TurnGapError)


class Progress(NamedTuple):
    """Number of stored turns, and of the tokens of their prompts and responses.

    The tokens of a trajectory that is not open are not counted: None.
    """

    num_turns: int
    num_tokens: int | None


class Recording:
    """The trajectory of one session, as this process writes it."""

    def __init__(
        self,
        session: Session,
        publishers: Publishers,
        client: redis.asyncio.Redis,
        sessions: SessionKeys,
    ) -> None:
        self.session = session
        self._publishers = publishers
        self._client = client
        self._sessions = sessions

    async def open(self) -> Progress:
        """Open the trajectory, or adopt it, and return what the store has of it.

        ConflictError once it has ended; RejectedError with `retry_after_s` while the run has no
        capacity for its group.
        """
        async with self._held() as (run_writer, slot):
            writer = await self._opened(run_writer, slot)
            return _progress(writer)

    async def look(self) -> tuple[str, Progress]:
        """Return the state of the trajectory, and what the store has of it; open nothing.

        An open one is adopted, so that its lease is renewed. One without an entry is "new".
        """
        async with self._held() as (run_writer, slot):
            if not slot.is_open:
                stored = await read_stored(self._client, run_writer.run, slot.key)
                if not stored.is_open:
                    state = stored.state if stored.is_known else "new"
                    return state, Progress(len(stored.turns), None)
            return "open", _progress(await self._opened(run_writer, slot))

    async def append(self, turns: Sequence[WrittenTurn]) -> None:
        """Store these turns in this order, after those that are there, and each of them once."""
        for tries_left in reversed(range(_MAX_TRIES)):
            async with self._held() as (run_writer, slot):
                writer = await self._opened(run_writer, slot)
                new = [each for each in turns if each.turn.call_id not in writer.call_ids]
                if not new:
                    return
                error = await self._delivered(run_writer, slot, first=writer.num_turns, turns=new)
                if error is None:
                    return
                if not tries_left or not isinstance(error, _WRITTEN_ELSEWHERE):
                    raise error
                slot.drop()

    async def seal(self, seal: Seal) -> None:
        """Seal the trajectory. The same seal again changes nothing; another is a ConflictError."""
        async with self._held() as (run_writer, slot):
            call_ids = await self._call_ids(run_writer, slot)
            seal = seal._replace(superseded=superseded_turns(call_ids))
            if error := await self._delivered(run_writer, slot, seal=seal):
                raise error

    async def abandon(self, reason: str) -> None:
        """Abandon the trajectory, so that its group does not wait for it: none of it is trained."""
        async with self._held() as (run_writer, slot):
            with contextlib.suppress(ConflictError, FencedError):  # the delivery says why
                await self._opened(run_writer, slot)
            if error := await self._delivered(run_writer, slot, abandon_reason=reason):
                raise error

    @contextlib.asynccontextmanager
    async def _held(self) -> AsyncIterator[tuple[RunWriter, Slot]]:
        """Hold the trajectory in the block. Its lease is renewed until the session expires."""
        session = self.session
        async with self._publishers.borrow(
            session.run, session.writer, [session.key], owner=session.owner, is_shared=True
        ) as (run_writer, slots):
            slot = slots[session.key]
            left_s = (session.expires_ms - await self._sessions.now_ms()) / 1000
            slot.kept_until_s = asyncio.get_running_loop().time() + left_s
            yield run_writer, slot

    async def _opened(self, run_writer: RunWriter, slot: Slot) -> IngestWriter:
        if slot.writer is not None and slot.is_open:
            return slot.writer
        stored = await read_stored(self._client, run_writer.run, slot.key)
        if stored.is_known and not stored.is_open:
            raise stored.ended("a model call")
        if stored.is_open:
            slot.writer = await run_writer.adopt_key(slot.key)
            return slot.writer
        return await self._new(run_writer, slot)

    async def _new(self, run_writer: RunWriter, slot: Slot) -> IngestWriter:
        """Open the trajectory in the store, and its group with it."""
        session, key = self.session, slot.key
        if not session.num_samples:
            raise ConflictError(
                f"{key.readable_name} is not open: open its group with POST "
                "/v1/runs/{run}/groups, or take a session key from /v1/runs/{run}/sessions"
            )
        group = GroupOpened(
            group_id=key.group_id, prompt_uid=session.prompt_uid, num_samples=session.num_samples
        )
        delivery = Delivery(run_writer, self._client, {key: slot})
        opened = (await delivery.open_members([Opening(group, [key])]))[group]
        if isinstance(opened, TurnstreamError):
            raise opened
        if slot.writer is None:  # it was opened in between
            slot.writer = await run_writer.adopt_key(key)
        return slot.writer

    async def _call_ids(self, run_writer: RunWriter, slot: Slot) -> Mapping[str, int]:
        """Return the call ids of the stored turns with their indexes, also after the end."""
        with contextlib.suppress(ConflictError, FencedError):
            return (await self._opened(run_writer, slot)).call_ids
        stored = await read_stored(self._client, run_writer.run, slot.key)
        return _stored_call_ids(stored)

    async def _delivered(
        self, run_writer: RunWriter, slot: Slot, **fields: Any
    ) -> TurnstreamError | None:
        """Return why a write is refused; None once the store has it."""
        write = Write(item=0, key=slot.key, **fields)
        delivery = Delivery(run_writer, self._client, {slot.key: slot})
        [outcome] = await delivery.deliver([write])
        return outcome.error


def _progress(writer: IngestWriter) -> Progress:
    return Progress(writer.num_turns, writer.num_bytes // 4)


def _stored_call_ids(stored: StoredTrajectory) -> dict[str, int]:
    turns = map(decode_turn, stored.turns)
    return {turn.call_id: turn.index for turn in turns if turn.call_id}
