"""Single writes that the store accepts also when it is full.

Without them a full store would stay full: results need to be announced before their commands are
covered, and the sessions of living clients would be closed.
"""

from __future__ import annotations

from typing import Final

from turnstream.store.client.scripts import Argument, Command, Script

_WRITE: Final = Script("essential_write", "turnstream_server.operations")


def essential_write(name: str, key: str, *words: Argument) -> Command:
    """Return a command with one key, for `run_command`; nothing is sent.

    >>> essential_write("HSET", "tm:bases", "tiny", "{}").args
    ('HSET', 'tiny', '{}')
    """
    return Command(_WRITE, (key,), (name, *words))
