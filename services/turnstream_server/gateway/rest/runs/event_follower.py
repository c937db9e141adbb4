"""Reads the events of a run in order, from a position on, without a gap."""

from __future__ import annotations

from typing import Any, Final

from turnstream.errors import ReleasedError
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream_server.gateway.state import Gateway
from turnstream_server.gateway.stream_waits import EntryId
from turnstream_server.ledger.core.scan import EventEntry, read_events_async
from turnstream_server.ledger.leadership.snapshots import last_event_id

BEGINNING: Final = "0-0"


class EventFollower:
    """Follows one run.

    Args:
        gateway: the state of the process.
        run: id of the run.
        after: id of the event before the first; `BEGINNING` for all stored ones.

    Attributes:
        position: id of the newest event that was read.
        is_deleted: the run was deleted, and no event follows.
    """

    def __init__(self, gateway: Gateway, run: str, *, after: str) -> None:
        self.position = after
        self.is_deleted = False
        self._gateway = gateway
        self._run = run
        self._names = keys.run_keys(run)
        self._wake_id = BEGINNING

    async def skip(self) -> None:
        """Continue after the newest event."""
        self.position = await last_event_id(self._gateway.client, self._run)

    async def read(self) -> list[EventEntry]:
        """Return the next stored events, at most one slice; none at the end.

        Raises:
            ReleasedError: events after the position may have been deleted.
        """
        client, names = self._gateway.client, self._names
        # A deletion of the run after this read moves the stream `wake`.
        self._wake_id = await self._newest_wake_id()
        entries = await read_events_async(client, self._run, after=self.position)
        with translating():
            pipeline = client.pipeline(transaction=False)
            pipeline.exists(names.frontier)
            pipeline.hget(names.snapshot, "before")
            pipeline.execute_command("XRANGE", names.events, self.position, self.position)
            exists, before, own = await pipeline.execute()
        self.is_deleted = not exists
        if exists and not own:
            self._check_not_before((before or b"0-0").decode())
        if entries:
            self.position = entries[-1].event_id
        return entries

    async def wait(self, *, timeout_s: float) -> None:
        """Return when there may be another event, or the run may be deleted.

        Raises:
            UnavailableError: the process stops.
        """
        known = {self._names.events: self.position, self._names.wake: self._wake_id}
        await self._gateway.streams.wait(known, timeout_s=timeout_s)

    async def _newest_wake_id(self) -> str:
        with translating():
            entries: Any = await self._gateway.client.execute_command(
                "XREVRANGE", self._names.wake, "+", "-", "COUNT", 1
            )
        return entries[0][0].decode() if entries else BEGINNING

    def _check_not_before(self, oldest: str) -> None:
        """Refuse a position whose event is not stored, and before the oldest that is kept.

        The oldest events are deleted first. So none is missing after an event that is stored.
        """
        is_beginning = self.position == BEGINNING
        if not is_beginning and EntryId.parse(self.position) < EntryId.parse(oldest):
            raise ReleasedError(
                f"events after {self.position} are no longer stored: begin without Last-Event-ID, "
                f"at {oldest}"
            )
