"""A client for a command that reads a store, with a time limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final

import redis

from turnstream.errors import StoreUnavailableError
from turnstream.store.client.connection import address_of, connect
from turnstream.store.waits.bounded_call import unanswered

SILENT_S: Final = 5.0
"""A store that does not answer for so long is silent."""


@contextlib.contextmanager
def store_client(url: str, *, silent_s: float | None = None) -> Iterator[redis.Redis]:
    """Return a client for as long as the block lasts.

    Args:
        url: address of the store.
        silent_s: longest time without an answer; None for SILENT_S.

    Raises:
        StoreUnavailableError: the store is away or silent, with reasons.
    """
    silent_s = SILENT_S if silent_s is None else silent_s
    began_s = time.monotonic()
    try:
        with connect(url, silent_s=silent_s) as client:
            yield client
    except StoreUnavailableError as error:
        since_s = time.monotonic() - began_s
        reason = unanswered(error, address=address_of(url), since_s=since_s)
        raise StoreUnavailableError(reason.sentence, [reason], error.retry_after_s) from error
