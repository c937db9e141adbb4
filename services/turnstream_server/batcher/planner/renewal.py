"""Renewal of leaderships in a thread of its own, while the event loop is busy.

Decoding 64 MB of payload, or a page of events, must not cost a leadership. A loop that hangs must
lose it: the loop touches each term, and a term that was not touched for MAX_STALL_LEASES leases is
not renewed. The next leader has a higher epoch, so the store refuses late writes of the old one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from turnstream.errors import FencedError, TurnstreamError
from turnstream.store.client.connection import connect
from turnstream.store.client.scripts import run_commands
from turnstream_server.ledger.leadership.writes import renew_command

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE: Final = 3
"""Two of them may fail before the leadership is lost."""

MAX_STALL_LEASES: Final = 6
"""With the usual lease of 5 s, half a minute: no slice of work takes so long, the loop hangs."""

_TOUCHES_PER_LEASE: Final = 8
"""How often the event loop touches a term, and reads whether it is lost."""

_JOIN_TIMEOUT_S: Final = 5.0


class _RenewedTerm:
    """A leadership that is being renewed, until `lost` says why it ended."""

    def __init__(self, run: str, epoch: int) -> None:
        self.run = run
        self.epoch = epoch
        self.touched_s = time.monotonic()  # when the event loop was last seen at work
        self.lost = ""


class LeadershipKeeper:
    """Renews the leases of one replica's leaderships, of any number of runs."""

    def __init__(self, url: str, *, owner: str, lease_s: float) -> None:
        self.url = url
        self.owner = owner
        self.lease_s = lease_s
        self._client = connect(url, num_retries=0)
        self._terms: set[_RenewedTerm] = set()
        self._lock = threading.Lock()
        self._renewed_s = time.monotonic()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def num_terms(self) -> int:
        """Number of leaderships that are being renewed."""
        return len(self._terms)

    @property
    def lag_s(self) -> float:
        """Seconds since the leaderships were renewed; 0 without any."""
        with self._lock:
            return time.monotonic() - self._renewed_s if self._terms else 0.0

    async def hold(self, run: str, epoch: int) -> None:
        """Keep a leadership that was just acquired."""
        term = _RenewedTerm(run, epoch)
        with self._lock:
            if not self._terms:
                self._renewed_s = term.touched_s
            self._terms.add(term)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._renew_until_closed, name="turnstream-leadership", daemon=True
                )
                self._thread.start()
        try:
            while not term.lost:
                term.touched_s = time.monotonic()
                await asyncio.sleep(self.lease_s / _TOUCHES_PER_LEASE)
            raise FencedError(term.lost)
        finally:
            with self._lock:
                self._terms.discard(term)

    async def close(self) -> None:
        """End the thread and disconnect."""
        self._closed.set()
        self._client.connection_pool.disconnect()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_S)
        self._client.close()

    def _renew_until_closed(self) -> None:
        usual_s = pause_s = self.lease_s / RENEWALS_PER_LEASE
        while not self._closed.wait(pause_s):
            pause_s = usual_s
            try:
                self._renew(self._living_terms())
            except TurnstreamError as error:
                if not self._closed.is_set():
                    logger.warning("leaderships cannot be renewed: %s", error)
                pause_s = usual_s / RENEWALS_PER_LEASE
            except Exception:  # a defect must not cost every other leadership of this replica
                logger.exception("the renewal of leaderships failed")

    def _living_terms(self) -> list[_RenewedTerm]:
        oldest_s = time.monotonic() - MAX_STALL_LEASES * self.lease_s
        with self._lock:
            terms = list(self._terms)
        living = [term for term in terms if term.touched_s >= oldest_s]
        if len(living) < len(terms):
            num_lost = len(terms) - len(living)
            logger.error("the event loop hangs: %d leaderships are not renewed any more", num_lost)
        return living

    def _renew(self, terms: Sequence[_RenewedTerm]) -> None:
        if not terms:
            return
        commands = [
            renew_command(term.run, owner=self.owner, epoch=term.epoch, lease_s=self.lease_s)
            for term in terms
        ]
        replies: list[Any] = run_commands(self._client, commands)
        self._renewed_s = time.monotonic()
        for term, reply in zip(terms, replies, strict=True):
            if isinstance(reply, Exception):
                logger.warning("the leadership of run %s cannot be renewed: %s", term.run, reply)
                continue
            is_ours, epoch, owner, *_ = reply
            if not is_ours:
                leader = owner.decode()
                term.lost = f"epoch {term.epoch} has ended, {leader!r} leads with epoch {epoch}"
