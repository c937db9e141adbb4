"""Leases of a worker, renewed by a thread of their own: a device pass may take minutes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

import redis

from turnstream.errors import RejectedError, UnavailableError
from turnstream_server.operations.models import BaseModel, register_base

logger = logging.getLogger(__name__)

_RENEW_S: Final = 4.0
_REGISTER_EVERY: Final = 2
"""Renewals between two registrations of the base models, which last 30 s."""


class Leases:
    """Renews leases, and the registrations of base models, in a daemon thread."""

    def __init__(self, client: redis.Redis, bases: Sequence[BaseModel]) -> None:
        self._client = client
        self._bases = bases
        self._held: dict[str, Callable[[], None]] = {}
        self._ended: dict[str, RejectedError] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def __enter__(self) -> Leases:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def hold(self, name: str, renew: Callable[[], None]) -> None:
        """Renew a lease from now on, by a call that raises RejectedError once it has ended."""
        self._held[name] = renew

    def drop(self, name: str) -> None:
        """Stop renewing a lease."""
        self._held.pop(name, None)
        self._ended.pop(name, None)

    def ended(self) -> dict[str, RejectedError]:
        """Return the error of each lease that has ended, at its name, until it is dropped."""
        return dict(self._ended)

    def _run(self) -> None:
        count = 0
        while True:
            try:
                if count % _REGISTER_EVERY == 0:
                    for base in self._bases:
                        register_base(self._client, base)
                self._renew()
            except UnavailableError as error:
                logger.warning("leases are not renewed: %s", error)
            except Exception:
                logger.exception("leases are not renewed")
            count += 1
            if self._stopped.wait(_RENEW_S):
                return

    def _renew(self) -> None:
        for name, renew in [*self._held.items()]:
            try:
                renew()
            except RejectedError as error:
                if name in self._held:
                    self._ended[name] = error
