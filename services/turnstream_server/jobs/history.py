"""The history of a run, read from the store in increments."""

from __future__ import annotations

import redis

from turnstream.errors import RecordError
from turnstream.records.events import decode_event
from turnstream.records.manifests import decode_manifest
from turnstream.store.client import keys
from turnstream.types import GroupOpened, SealedTrajectory, TrajectoryKey
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.bus.core.scan import entry_ms, server_ms, stream_entries
from turnstream_server.bus.queries.batch_numbers import BatchNumbers, numbers_of
from turnstream_server.bus.queries.ledger import read_ledger
from turnstream_server.jobs.summary import Summary, summarise

_LAST_OF_STEP = (1 << 64) - 1
"""Above every revision in the id of a plan, which is <step>-<revision>."""


class RunHistory:
    """The statistics of one run since its beginning.

    An event may be in the stream twice; it counts once.
    """

    def __init__(self, client: redis.Redis, run: str) -> None:
        self._client = client
        self._run = run
        self._names = keys.run_keys(run)
        self._groups: set[str] = set()
        self._sealed: dict[TrajectoryKey, SealedTrajectory] = {}
        self._batches: dict[int, BatchNumbers] = {}
        self._stepped = 0
        self._last_event = ""
        self._first_event_ms = 0
        self._last_step_ms = 0

    def summary(self) -> Summary:
        """Return the statistics, with everything that was added since the last call."""
        for entry_id, record in stream_entries(
            self._client, self._names.events, after=self._last_event
        ):
            self._first_event_ms = self._first_event_ms or entry_ms(entry_id)
            self._last_event = entry_id
            self._add_event(record)
        # A step is planned again after damage, unless it is stepped.
        after = f"{self._stepped}-{_LAST_OF_STEP}"
        for _, record in stream_entries(self._client, self._names.plan, after=after, page=1):
            manifest = decode_manifest(record)
            self._batches[manifest.step] = numbers_of(manifest)
        frontier = read_frontier(self._client, self._run)
        if frontier.stepped != self._stepped:
            self._stepped, self._last_step_ms = frontier.stepped, server_ms(self._client)
        ledger = read_ledger(self._client, self._run)
        ledger.check()
        return summarise(
            num_groups=len(self._groups),
            sealed=[*self._sealed.values()],
            batches=[batch for step, batch in self._batches.items() if step <= frontier.stepped],
            planned=frontier.planned,
            stepped=frontier.stepped,
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
            self._sealed.setdefault(event.key, event)
