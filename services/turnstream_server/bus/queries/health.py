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
    """Return why a store refuses writes now; empty if it takes them.

    Full memory does not count: producers wait, and calls that free memory are not refused. See
    `store_note`.

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
    """Return that the memory of a store is full, with its holders; empty if it is not.

    Args:
        facts: the reply to INFO, by name.
        held: bytes of each run.
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
    """The same, asked now."""
    with translating():
        facts: Any = client.info(*SECTIONS)
    return store_trouble(facts)
