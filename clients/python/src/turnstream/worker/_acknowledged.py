"""The acknowledged steps of a session, acknowledged again after a store has lost them.

A restarted store may have lost its last second. An acknowledgement that it still has changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from turnstream.errors import ConflictError
from turnstream.worker._calls import BatcherCalls

MAX_KEPT: Final = 1000
"""Newest steps in memory. A store loses some seconds, and a step takes at least milliseconds."""

Reply = TypeVar("Reply")


class AcknowledgedSteps:
    """The acknowledged steps of one session, in order. Two threads may call it."""

    def __init__(self, calls: BatcherCalls) -> None:
        self._calls = calls
        # (step, manifest hash) each; replaced and never changed: another thread reads it.
        self._steps: tuple[tuple[int, str], ...] = ()

    def acknowledge(self, step: int, *, manifest_hash: str) -> str:
        """Acknowledge the next step and return its recovery token as text."""
        token = self.after_all_steps(lambda: self._calls.stepped(step, manifest_hash=manifest_hash))
        self._steps = (*self._steps, (step, manifest_hash))[-MAX_KEPT:]
        return token

    def after_all_steps(self, call: Callable[[], Reply]) -> Reply:
        """Return the result of a call; after a ConflictError, acknowledge again and call again."""
        try:
            return call()
        except ConflictError:
            if not self._steps:
                raise
            self.repeat()
        return call()

    def repeat(self, *, timeout_s: float | None = None) -> None:
        """Acknowledge the newest step again, and first the steps before it that the store lost.

        The longest wait for each answer is `timeout_s`, or the timeout of the connection.

        Raises:
            UnavailableError: no answer came.
            ConflictError, StoreBehindError: the store has another batch of a step, or none.
            FencedError: a newer trainer session took over.
        """
        lost: list[tuple[int, str]] = []
        for step, manifest_hash in reversed(self._steps):
            try:
                self._calls.stepped(step, manifest_hash=manifest_hash, timeout_s=timeout_s)
                break
            except ConflictError:
                lost.append((step, manifest_hash))
        for step, manifest_hash in reversed(lost):
            self._calls.stepped(step, manifest_hash=manifest_hash, timeout_s=timeout_s)
