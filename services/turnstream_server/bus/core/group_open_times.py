"""Times at which groups were opened, also those whose event is no longer stored."""

from __future__ import annotations

from typing import Any

import redis

from turnstream.errors import RecordError
from turnstream.records.snapshots import decode_snapshot
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import reading
from turnstream_server.bus.core.scan import entry_ms


def openings_in_snapshot(client: redis.Redis, run: str) -> dict[str, int]:
    """Return when each open or ready group was opened, in ms, from the snapshot of the planner."""
    name = keys.run_keys(run).snapshot
    with reading(name), translating():
        record: Any = client.hget(name, "record")
    if record is None:
        return {}
    try:
        with reading(name, "record"):
            groups = decode_snapshot(record).fold.groups
            # A group whose plan was withdrawn has no time there.
            opened = {keys.encode_name(name): entry_ms(g.opened_by) for name, g in groups.items()}
    except RecordError:
        return {}  # damaged, or of a newer release
    return {name: opened_ms for name, opened_ms in opened.items() if opened_ms}
