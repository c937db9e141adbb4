"""Reading which models have new commands, and which requests and sessions have ended."""

from __future__ import annotations

from typing import Any, Final, cast

import redis

from turnstream.store.client.connection import MAX_BLOCK_S
from turnstream.store.client.replies import translating
from turnstream_server.commands.keys import DONE, WAKE

_COUNT: Final = 1_000
_FIELDS: Final = {WAKE: b"m", DONE: b"r"}


class Wakeups:
    """One of the streams WAKE and DONE, from its newest entry at the first read.

    Entries can be missed while the store is away. A reader must also look at all its models, or
    requests, from time to time.
    """

    def __init__(self, client: redis.Redis, stream: str = WAKE) -> None:
        self._client = client
        self._stream = stream
        self._position: Any = None

    def read(self, *, block_s: float) -> set[str]:
        """Return the ids of new entries; wait at most `block_s` for the first one."""
        wait_ms = round(min(block_s, MAX_BLOCK_S) * 1000) or None  # 0 would wait without end
        with translating():
            if self._position is None:
                newest: Any = self._client.xrevrange(self._stream, count=1)
                self._position = newest[0][0] if newest else "0"
            found = cast(
                "list[Any]",
                self._client.xread({self._stream: self._position}, block=wait_ms, count=_COUNT),
            )
        ids: set[str] = set()
        for _, entries in found or ():
            for entry_id, fields in entries:
                self._position = entry_id
                ids.add(fields.get(_FIELDS[self._stream], b"").decode())
        return ids
