"""Time limits of calls of the store: a server may keep its connections and not answer.

A process that is stopped, or whose machine is gone, keeps its connections.
"""

from __future__ import annotations

from typing import Final

from redis.exceptions import TimeoutError as RedisTimeoutError

SOCKET_TIMEOUT_S: Final = 30.0
"""A server that is silent for so long counts as away."""

SILENT_S: Final = 5.0
"""The same where a person or a program waits for one short answer."""

CONNECT_TIMEOUT_S: Final = 5.0

ANSWER_S: Final = 0.5
"""Seconds beyond its deadline for which a wait may depend on an earlier call."""


def is_silence(error: BaseException) -> bool:
    """Return whether a failed call was sent and not answered in time."""
    return isinstance(error, RedisTimeoutError | TimeoutError)
