"""The common part of both senders: which waits there are, and how everything ends."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from turnstream.errors import StoreUnavailableError, WaitReason
from turnstream.generator.outbox.outbox import Outbox

ASK_AGAIN_S = 5.0
"""A waiting group asks again after this time, even if its run's wake stream says nothing: it may
wait for memory of the server, which another run may have freed."""

LISTEN_AGAIN_S = 0.5

_Waited = TypeVar("_Waited")

_logger = logging.getLogger(__name__)


class SenderBase(ABC, Generic[_Waited]):
    """Sends one outbox. Its waits return None, or what can be awaited."""

    def __init__(self, url: str, outbox: Outbox) -> None:
        self._url = url
        self._outbox = outbox
        self._is_closed = False

    def wait_until(self, has_capacity: Callable[[], bool], *, timeout_s: float) -> _Waited:
        """Wait until more may be accepted.

        Raises:
            NotReadyError: there was no capacity within `timeout_s`, with the reason.
        """
        message = "no room for more writes within"
        return self._wait(has_capacity, timeout_s, message, self._outbox.why.no_space)

    def flush(self, timeout_s: float | None) -> _Waited:
        """Wait until everything accepted is acknowledged or has failed.

        Raises:
            NotReadyError: writes are unacknowledged after `timeout_s`, with the reason.
        """
        message = "writes are still on their way after"
        return self._wait(
            lambda: self._outbox.is_idle, timeout_s, message, self._outbox.why.waiting
        )

    def flush_to_disk(self, timeout_s: float | None) -> _Waited:
        """Wait for `flush`, and until the store has had the time to sync.

        Raises:
            NotReadyError: writes may not be on disk after `timeout_s`, with the reason.
        """
        message = "writes may not be on disk after"
        return self._wait(self._is_on_disk, timeout_s, message, self._outbox.why.not_on_disk)

    @abstractmethod
    def _wait(
        self,
        is_done: Callable[[], bool],
        timeout_s: float | None,
        message: str,
        reasons: Callable[[float], Sequence[WaitReason]],
    ) -> _Waited:
        """Wait until this is done; `reasons` of the time say why it is not."""

    def _is_on_disk(self) -> bool:
        return self._outbox.is_on_disk and not self._is_closed

    def _require_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailableError("the publisher was closed")

    def _end(self, reason: str) -> None:
        """Accept nothing more, and fail unacknowledged writes."""
        self._is_closed = True
        self._outbox.fail_all(StoreUnavailableError(reason))

    def _end_failed(self, error: Exception) -> None:
        _logger.error("the sender of a publisher failed", exc_info=error)
        self._end(f"the sender failed: {error!r}")

    @property
    def _must_listen(self) -> bool:
        """Whether groups wait for the run's wake stream."""
        return self._outbox.wake_id is not None and not self._is_closed
