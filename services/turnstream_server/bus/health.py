"""Whether a store takes writes, in its own words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from turnstream.store.replies import translating

SECTION = "persistence"
"""Of the reply to INFO: what `store_trouble` reads."""


def store_trouble(facts: Mapping[str, Any]) -> str:
    """Why a store refuses writes now; empty where it takes them.

    Memory that is full is no trouble: producers wait, and what frees it is not refused.

    Args:
        facts: the reply to INFO, by name.

    >>> store_trouble({"loading": 0, "aof_last_write_status": "ok"})
    ''
    >>> store_trouble({"loading": 0, "aof_last_write_status": "err"})
    'the store refuses writes: its last write to the disk failed'
    >>> store_trouble({"loading": 1})
    'the store is loading its data'
    """
    if int(facts.get("loading", 0)):
        return "the store is loading its data"
    if facts.get("aof_last_write_status", "ok") != "ok":
        return "the store refuses writes: its last write to the disk failed"
    return ""


def read_store_trouble(client: redis.Redis) -> str:
    """The same, asked now.

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    with translating():
        facts: Any = client.info(SECTION)
    return store_trouble(facts)
