"""Single writes that the store accepts also when it is full, and its time.

Without them a full store would stay full: results need to be announced before their commands are
covered, and the sessions of living clients would be closed.
"""

from __future__ import annotations

from typing import Final, cast

import redis

from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Argument, Command, Script

_WRITE: Final = Script("essential_write", "turnstream_server.operations")


def essential_write(name: str, key: str, *words: Argument) -> Command:
    """Return a command with one key, for `run_command`; nothing is sent.

    >>> essential_write("HSET", "tm:bases", "tiny", "{}").args
    ('HSET', 'tiny', '{}')
    """
    return Command(_WRITE, (key,), (name, *words))


def server_ms(client: redis.Redis) -> int:
    """Return the time of the store in milliseconds."""
    with translating():
        seconds, microseconds = cast("tuple[int, int]", client.time())
    return seconds * 1000 + microseconds // 1000
