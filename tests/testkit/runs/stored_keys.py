"""The types of stored keys, from the tables in the modules that declare keys."""

from __future__ import annotations

import re
from typing import Final

from turnstream.store.client import keys
from turnstream_server.keys.sessions import SESSIONS
from turnstream_server.keys.store import KEYS
from turnstream_server.operations import keys as command_keys

_ROW: Final = re.compile(r"^(\S+) +(stream|hash|zset|set)\b", re.MULTILINE)
_TYPES: Final = dict(_ROW.findall(keys.__doc__ or ""), incarnation="string")
_MODEL_TYPES: Final = dict(_ROW.findall(command_keys.__doc__ or ""))
_OF_A_NAME: Final = {"models": "set", "samples": "stream", "download": "string"}
_KEY: Final = re.compile(r"ts:\{[^{}/~]+(/[^{}/]+/\d+/\d+)?\}(?:~\d+)?:([a-z]+)")
_MODEL_KEY: Final = re.compile(r"tm:\{[^{}/]+\}:([a-z]+)")
_NAME_KEY: Final = re.compile(r"tm:(models|samples|download):[^{}/]+")


def declared_type(key: str) -> str | None:
    """Return the Redis type that a key of this name must have; None if it is not declared.

    >>> declared_type("ts:{a}~2:ledger"), declared_type("ts:{a/g/0/0}:meta"), declared_type("a")
    ('hash', 'hash', None)
    >>> declared_type("tm:{S:train:0}:bodies"), declared_type("tm:samples:tiny%2Fbyte")
    ('hash', 'stream')
    """
    if found := _KEY.fullmatch(key):
        is_payload = found[2] in keys.TrajectoryKeys._fields
        return _TYPES.get(found[2]) if is_payload == bool(found[1]) else None
    if found := _MODEL_KEY.fullmatch(key):
        return _MODEL_TYPES.get(found[1])
    if found := _NAME_KEY.fullmatch(key):
        return _OF_A_NAME[found[1]]
    if key in (KEYS, SESSIONS):
        return "hash" if key == KEYS else "string"
    if key.startswith("ts:"):
        return _TYPES.get(key)
    return _MODEL_TYPES.get(key)
