"""The types of stored keys, from the table in `turnstream.store.client.keys`."""

from __future__ import annotations

import re

from turnstream.store.client import keys

_TYPES = dict(
    re.findall(r"^(\S+) +(stream|hash|zset|set)\b", keys.__doc__ or "", re.MULTILINE),
    incarnation="string",
)
_KEY = re.compile(r"ts:\{[^{}/~]+(/[^{}/]+/\d+/\d+)?\}(?:~\d+)?:([a-z]+)")


def declared_type(key: str) -> str | None:
    """Return the Redis type that a key of this name must have; None if it is not declared.

    >>> declared_type("ts:{a}~2:ledger"), declared_type("ts:{a/g/0/0}:meta"), declared_type("a")
    ('hash', 'hash', None)
    """
    found = _KEY.fullmatch(key)
    if found is None:
        return _TYPES.get(key) if key.startswith("ts:") else None
    is_payload = found[2] in keys.TrajectoryKeys._fields
    return _TYPES.get(found[2]) if is_payload == bool(found[1]) else None
