"""Reading which models have new commands."""

from __future__ import annotations

from typing import Any, Final, cast

import redis

from turnstream.store.client.connection import MAX_BLOCK_S
from turnstream.store.client.replies import translating
from turnstream_server.commands.keys import WAKE

_COUNT: Final = 1_000


class Wakeups:
    """The stream of models with new commands, from its newest entry at the first read.

    Entries can be missed while the store is away. A reader must also look at all its models from
    time to time.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._position: Any = None

    def read(self, *, block_s: float) -> set[str]:
        """Return the ids of models with new commands; wait at most `block_s` for the first one."""
        wait_ms = round(min(block_s, MAX_BLOCK_S) * 1000) or None  # 0 would wait without end
        with translating():
            if self._position is None:
                newest: Any = self._client.xrevrange(WAKE, count=1)
                self._position = newest[0][0] if newest else "0"
            found = cast(
                "list[Any]",
                self._client.xread({WAKE: self._position}, block=wait_ms, count=_COUNT),
            )
        models: set[str] = set()
        for _, entries in found or ():
            for entry_id, fields in entries:
                self._position = entry_id
                models.add(fields.get(b"m", b"").decode())
        return models
