"""Deadlines for calls of the store: a server may keep its connections and not answer.

A process that is stopped, or whose machine is gone, keeps its connections. Without a deadline a
call waits for the timeout of the socket.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any, Final

from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

SOCKET_TIMEOUT_S: Final = 30.0
"""A server that is silent for so long counts as away."""

CONNECT_TIMEOUT_S: Final = 5.0

ANSWER_S: Final = 0.5
"""Seconds beyond its deadline for which a wait may depend on an earlier call."""

_LIMITS_EVERY_S: Final = 0.05  # a system call for each reply of an exchange is expensive
_LEAST_S: Final = 0.001  # a socket with a timeout of 0 would not wait at all, and say so otherwise

_end_s: ContextVar[float | None] = ContextVar("turnstream_calls_end_s", default=None)


@contextlib.contextmanager
def ending_by(deadline_s: float) -> Iterator[None]:
    """Limit all calls of this thread inside the block, with their retries, to a deadline.

    A call that times out raises the error of a lost connection: its outcome is unknown.

    Args:
        deadline_s: in seconds of `time.monotonic`; an earlier one that is in force stays.
    """
    outer_s = _end_s.get()
    before = _end_s.set(deadline_s if outer_s is None else min(outer_s, deadline_s))
    try:
        yield
    finally:
        _end_s.reset(before)


@contextlib.contextmanager
def ending_within(seconds: float) -> Iterator[None]:
    """Limit calls like `ending_by`, to so many seconds from now."""
    with ending_by(time.monotonic() + seconds):
        yield


def _left_s() -> float | None:
    """Return the seconds that a call may still wait; None without a deadline."""
    end_s = _end_s.get()
    return None if end_s is None else max(_LEAST_S, end_s - time.monotonic())


class BoundedPauses(ExponentialBackoff):
    """Pauses between the tries of a call, all of them before its deadline."""

    def compute(self, failures: int) -> float:
        """Return the seconds until the next try."""
        pause_s, left_s = super().compute(failures), _left_s()
        if left_s is not None and pause_s >= left_s:
            raise RedisError("the connection was lost, and there is no time for another try")
        return pause_s


@cache
def bounded(kind: type[Any]) -> type[Any]:
    """Return a class of connections of redis-py whose calls obey `ending_by`."""

    class Bounded(kind):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._own_s: float = self.socket_timeout
            self._is_limited = False
            self._limited_until_s = 0.0

        def _connect(self) -> Any:
            self._limit()
            return super()._connect()

        def check_health(self) -> None:
            """Limit the write before which the client calls this."""
            self._limit()
            super().check_health()

        def limit_read(self) -> None:
            """Limit the next of many reads after one write."""
            if time.monotonic() >= self._limited_until_s:
                self._limit()

        def _limit(self) -> None:
            left_s = _left_s()
            if left_s is None and not self._is_limited:
                return
            self._is_limited = left_s is not None
            self.socket_timeout = min(self._own_s, left_s or self._own_s)
            self.socket_connect_timeout = min(CONNECT_TIMEOUT_S, self.socket_timeout)
            self._limited_until_s = time.monotonic() + _LIMITS_EVERY_S
            if self._sock is not None:
                self._sock.settimeout(self.socket_timeout)

    return Bounded


def is_silence(error: BaseException) -> bool:
    """Return whether a failed call was sent and not answered in time."""
    return isinstance(error, RedisTimeoutError | TimeoutError)
