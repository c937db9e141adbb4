"""Stored records of API keys."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turnstream.errors import CorruptRecordError
from turnstream_server.keys.records import ApiKey, KeyLimits, decode_key, encode_key, owner_of

KEY = ApiKey(
    "id",
    "ci",
    frozenset({"read", "train"}),
    ("maze",),
    created_ms=5,
    expires_ms=7,
    limits=KeyLimits(0.5, None, 9),
    owner=owner_of("ci"),
)


def test_record_of_a_key_has_all_of_it() -> None:
    assert decode_key("id", encode_key(KEY)) == KEY


WRONG: list[dict[str, Any]] = [
    {"name": 5},
    {"name": "\ud800"},
    {"roles": "admin"},
    {"roles": [["admin"]]},
    {"roles": [1]},
    {"runs": "maze"},
    {"runs": [None]},
    {"created_ms": "5"},
    {"expires_ms": True},
    {"expires_ms": "7"},
    {"expires_ms": 10**400},
    {"limits": None},
    {"limits": {"requests_per_s": "5"}},
    {"limits": {"requests_per_s": 0}},
    {"limits": {"bytes_per_s": float("nan")}},
    {"limits": {"max_body_bytes": 10**400}},
    {"limits": {"other": 1}},
    {"other": 1},
]


def test_other_record_of_a_key_is_corrupt() -> None:
    values = json.loads(encode_key(KEY))
    damaged = [b"", b"[]", b"{}", b"\xff", b"5", b"[" * 100_000]
    for stored in [*damaged, *(json.dumps(values | each).encode() for each in WRONG)]:
        with pytest.raises(CorruptRecordError, match="the record of the key"):
            decode_key("id", stored)
