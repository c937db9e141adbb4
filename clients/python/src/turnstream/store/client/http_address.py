"""The names of the protocol of `/v1/store`: see http_connection.py."""

from __future__ import annotations

from typing import Final

PATH: Final = "/v1/store"
"""Path of the requests, below the address of a gateway."""

COMMANDS: Final = "application/vnd.turnstream.commands"
"""Media type of a request: commands in the bytes of the Redis protocol."""

REPLIES: Final = "application/vnd.turnstream.replies"
"""Media type of an answer: their replies."""

INSTANCE: Final = "Turnstream-Store"
"""Header with the name of the store's process."""
