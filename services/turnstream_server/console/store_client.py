"""A client for a command that reads a store, with a time limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import redis

from turnstream.errors import StoreUnavailableError
from turnstream.store.client.addresses import address_of
from turnstream.store.client.connection import connect
from turnstream.store.client.deadlines import SILENT_S
from turnstream.store.waits.bounded_call import unanswered


@contextlib.contextmanager
def store_client(url: str) -> Iterator[redis.Redis]:
    """Return a client for the block; StoreUnavailableError with reasons for a silent store."""
    began_s = time.monotonic()
    try:
        with connect(url, silent_s=SILENT_S) as client:
            yield client
    except StoreUnavailableError as error:
        since_s = time.monotonic() - began_s
        reason = unanswered(error, address=address_of(url), since_s=since_s)
        raise StoreUnavailableError(reason.sentence, [reason], error.retry_after_s) from error
