"""The steps that a session has acknowledged, said again to a store that forgot them.

A store that was started anew may have lost its last second. A trainer that lives on knows what it
had said, and is heard as the first time: a step that the store still has changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from turnstream.errors import ConflictError
from turnstream.worker._calls import BatcherCalls

MAX_KEPT: Final = 1000
"""Steps, the newest ones: what a store can lose takes seconds, and a step at least milliseconds."""

Reply = TypeVar("Reply")


class _Said(NamedTuple):
    step: int
    manifest_hash: str


class AcknowledgedSteps:
    """What was said by one session, in order. Two threads may call it.

    Args:
        calls: the connection.
    """

    def __init__(self, calls: BatcherCalls) -> None:
        self._calls = calls
        self._said: tuple[_Said, ...] = ()  # replaced, never changed: another thread reads it

    def say(self, step: int, *, manifest_hash: str) -> str:
        """Acknowledge the step after those before; gives its recovery token as text.

        Raises:
            FencedError: a newer trainer session took over.
            StoreBehindError: the store does not have the batch.
            ConflictError: the store has another batch, of this step or of one before it.
        """
        said = _Said(step, manifest_hash)
        token = self.insist(lambda: self._say(said))
        self._said = (*self._said, said)[-MAX_KEPT:]
        return token

    def insist(self, call: Callable[[], Reply]) -> Reply:
        """What a call gives that needs all steps so far; they are said again where it is refused.

        Raises:
            ConflictError: it is refused all the same.
            TurnstreamError: whatever else `call` raises.
        """
        try:
            return call()
        except ConflictError:
            if not self._said:
                raise
            self.say_again()
        return call()

    def say_again(self, *, timeout_s: float | None = None) -> None:
        """Say the newest step again, and in order those before it that are forgotten as well.

        Args:
            timeout_s: longest wait for each answer; None: that of the connection.

        Raises:
            UnavailableError: no answer came.
            ConflictError, StoreBehindError: the store has another batch of a step, or none.
            FencedError: a newer trainer session took over.
        """
        forgotten: list[_Said] = []
        for said in reversed(self._said):
            if self._is_heard(said, timeout_s=timeout_s):
                break
            forgotten.append(said)
        for said in reversed(forgotten):
            self._say(said, timeout_s=timeout_s)

    def _is_heard(self, said: _Said, *, timeout_s: float | None) -> bool:
        """Say it; False where it does not follow what the store knows."""
        try:
            self._say(said, timeout_s=timeout_s)
        except ConflictError:
            return False
        return True

    def _say(self, said: _Said, *, timeout_s: float | None = None) -> str:
        return self._calls.stepped(said.step, manifest_hash=said.manifest_hash, timeout_s=timeout_s)
