"""When the groups of a run were opened, also those whose event is no longer kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from turnstream.errors import RecordError
from turnstream.records.events import decode_event
from turnstream.records.snapshots import decode_snapshot
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import reading
from turnstream.store.run.configs import read_config
from turnstream.types import GroupOpened
from turnstream_server.bus.core.events import read_events
from turnstream_server.bus.core.scan import entry_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Openings:
    """When groups were opened, by the server's clock.

    Attributes:
        known_ms: by encoded name.
        others_ms: any other group was opened by then at the latest; None where nothing tells.
    """

    known_ms: Mapping[str, int]
    others_ms: int | None

    def oldest_ms(self, groups: Iterable[str]) -> tuple[int | None, bool]:
        """By when the first of some groups was opened, and whether it may have been earlier.

        >>> openings = Openings(known_ms={"g": 5, "h": 7}, others_ms=6)
        >>> openings.oldest_ms(["g", "h"]), openings.oldest_ms(["h", "unknown"])
        ((5, False), (6, True))
        """
        names = set(groups)
        found = [self.known_ms[name] for name in names & self.known_ms.keys()]
        has_others = len(found) < len(names)
        if has_others and self.others_ms is not None:
            found.append(self.others_ms)
        return min(found, default=None), has_others and bool(found)


def read_openings(client: redis.Redis, run: str) -> Openings:
    """Return when the groups of a run were opened, from its events and its planner's snapshot.

    Old events are removed first. So a group in neither is older than all kept events, or its event
    is unreadable.
    """
    names = keys.run_keys(run)
    known_ms = openings_in_snapshot(client, run)
    first_ms: int | None = None
    unread_ms = 0
    for entry in read_events(client, run):
        written_ms = entry_ms(entry.event_id)
        first_ms = written_ms if first_ms is None else first_ms
        try:
            event = decode_event(entry.record)
        except RecordError:
            unread_ms = written_ms
            continue
        if isinstance(event, GroupOpened):
            known_ms.setdefault(keys.encode_name(event.group_id), written_ms)
    if first_ms is not None:
        first_ms = max(first_ms, unread_ms, _newest_damaged_ms(client, names.damaged))
    return Openings(known_ms=known_ms, others_ms=first_ms)


def openings_in_snapshot(client: redis.Redis, run: str) -> dict[str, int]:
    """When the groups were opened that the planner's snapshot has as open or ready."""
    _, config = read_config(client, run)
    name = keys.run_keys(run).snapshot
    with reading(name), translating():
        record: Any = client.hget(name, "record")
    if record is None:
        return {}
    try:
        with reading(name, "record"):
            fold = decode_snapshot(record).restore_fold(config)
            openings = [*fold.openings()]
            # A group whose plan was withdrawn has its place in place of a moment.
            opened = {keys.encode_name(group): entry_ms(event_id) for group, event_id in openings}
    except RecordError:
        return {}  # damaged, or of a newer release: the events have to do
    return {name: opened_ms for name, opened_ms in opened.items() if opened_ms}


def _newest_damaged_ms(client: redis.Redis, damaged: str) -> int:
    """Return when the newest unreadable event was written."""
    with reading(damaged), translating():
        entries: Any = client.xrevrange(damaged, count=1)
    return entry_ms(entries[0][0].decode()) if entries else 0
