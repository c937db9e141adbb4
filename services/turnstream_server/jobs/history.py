"""The history of a run, read from the store in increments."""

from __future__ import annotations

from typing import Any, cast

import redis

from turnstream.errors import RecordError
from turnstream.records.events import decode_event
from turnstream.records.manifests import decode_manifest
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.types import GroupOpened, SealedTrajectory, TrajectoryKey
from turnstream_server.bus.core.frontier import NONE_WITHDRAWN, read_frontier
from turnstream_server.bus.queries.ledger import read_ledger
from turnstream_server.jobs.summary import (
    BatchNumbers,
    SealedFigures,
    Summary,
    figures_of_sealed,
    numbers_of,
    summarise,
)

_PAGE = 1_000


class RunHistory:
    """The statistics of one run, up to the last `refresh`.

    An event may be in the stream twice, and a batch may be planned again: events count once, and
    the newest plan of a step counts.
    """

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.run = run
        self._groups: set[str] = set()
        self._sealed: dict[TrajectoryKey, SealedFigures] = {}
        self._batches: dict[int, BatchNumbers] = {}
        self._stepped = 0
        self._first_event_ms = 0
        self._last_step_ms = 0
        self._client = client
        self._names = keys.run_keys(run)
        self._next_event = "-"
        self._next_plan = "-"
        self._withdrawn = NONE_WITHDRAWN

    def refresh(self) -> None:
        """Read what was added since the last time."""
        while entries := self._read(self._names.events, self._next_event):
            for entry_id, record in entries:
                self._first_event_ms = self._first_event_ms or int(entry_id.split("-")[0])
                self._add_event(record)
                self._next_event = f"({entry_id}"
        frontier = read_frontier(self._client, self.run)
        if frontier.withdrawn != self._withdrawn:
            self._withdrawn, self._next_plan = frontier.withdrawn, "-"
            self._batches = {s: b for s, b in self._batches.items() if s <= frontier.stepped}
        while entries := self._read(self._names.plan, self._next_plan):
            for entry_id, record in entries:
                manifest = decode_manifest(record)
                self._batches[manifest.step] = numbers_of(manifest)
                self._next_plan = f"({entry_id}"
        stepped = read_frontier(self._client, self.run).stepped
        if stepped != self._stepped:
            self._stepped, self._last_step_ms = stepped, self._server_ms()

    def summary(self) -> Summary:
        """All figures, as of now."""
        self.refresh()
        ledger = read_ledger(self._client, self.run)
        ledger.check()
        return summarise(
            num_groups=len(self._groups),
            sealed=list(self._sealed.values()),
            batches=self._batches,
            stepped=self._stepped,
            ledger={str(state): count for state, count in ledger.by_state.items()},
            elapsed_s=max(0, self._last_step_ms - self._first_event_ms) / 1_000,
        )

    def _add_event(self, record: bytes) -> None:
        try:
            event = decode_event(record)
        except RecordError:
            return  # the planner sets it aside
        if isinstance(event, GroupOpened):
            self._groups.add(event.group_id)
        elif isinstance(event, SealedTrajectory):
            self._sealed.setdefault(event.key, figures_of_sealed(event))

    def _read(self, stream: str, start: str) -> list[tuple[str, bytes]]:
        """Entries of a stream from `start` on: (id, record)."""
        with translating():
            entries: Any = self._client.xrange(stream, min=start, count=_PAGE)
        return [(entry_id.decode(), fields.get(b"r", b"")) for entry_id, fields in entries]

    def _server_ms(self) -> int:
        with translating():
            seconds, microseconds = cast("tuple[int, int]", self._client.time())
        return seconds * 1_000 + microseconds // 1_000
