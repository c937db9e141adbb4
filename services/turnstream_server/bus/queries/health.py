"""Whether a store takes writes, in its own words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import redis

from turnstream.store.client.fullness import Bytes
from turnstream.store.client.replies import translating
from turnstream_server.bus.queries.budget import HeldBytes

SECTIONS = ("persistence", "memory")
"""Sections of INFO that `store_trouble` and `store_note` read."""


def store_trouble(facts: Mapping[str, Any]) -> str:
    """Why a store refuses writes now; empty where it takes them.

    Memory that is full is no trouble: producers wait, and what frees it is not refused. It is
    reported by `store_note`.

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


def store_note(facts: Mapping[str, Any], held: Iterable[HeldBytes]) -> str:
    """Return that the memory of a store is full, and what holds it; empty while it is not.

    Args:
        facts: the reply to INFO, by name.
        held: bytes that each run holds.
    """
    runs = list(held)
    known = Bytes(
        used=int(facts.get("used_memory", 0)),
        allowed=int(facts.get("maxmemory", 0)),
        reserved=sum(each.reserved for each in runs),
        stored=sum(each.stored for each in runs),
        planned=sum(each.planned for each in runs),
    )
    if not known.refuses_writes:
        return ""
    return known.why_full(is_urgent=True).replace("this run holds", "its runs hold", 1)


def read_store_trouble(client: redis.Redis) -> str:
    """The same, asked now.

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    with translating():
        facts: Any = client.info(*SECTIONS)
    return store_trouble(facts)
