"""Leases of a worker, renewed by a thread of their own: a device pass may take minutes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final, Protocol

import redis

from turnstream.errors import EndOfRunError, RejectedError, UnavailableError
from turnstream_server.operations.bases import BaseModel, register_base

logger = logging.getLogger(__name__)

_RENEW_S: Final = 4.0
_REGISTER_EVERY: Final = 2
"""Renewals between two registrations of the base models, which last 30 s."""


class Renewed(Protocol):
    """Anything with a lease."""

    def renew(self) -> None:
        """Renew the lease; FencedError or EndOfRunError once it has ended."""
        ...


class Leases:
    """Renews leases, and the registrations of base models, in a daemon thread.

    Args:
        client: the store.
        bases: the base models of this worker; they are registered in the thread at once.
    """

    def __init__(self, client: redis.Redis, bases: Sequence[BaseModel]) -> None:
        self._client = client
        self._bases = bases
        self._held: dict[str, Renewed] = {}
        self._ended: dict[str, RejectedError] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def __enter__(self) -> Leases:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def hold(self, name: str, lease: Renewed) -> None:
        """Renew a lease from now on."""
        self._held[name] = lease

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
        for name, lease in [*self._held.items()]:
            try:
                lease.renew()
            except RejectedError as error:
                if name in self._held:
                    self._ended[name] = error


def is_end(error: RejectedError) -> bool:
    """Return whether the session of a model has ended, and no other worker runs it."""
    return isinstance(error, EndOfRunError)
