"""Names of model calls. A name has the hash of its request, so that a repeated one is recognised.

`<hash of the request>.<"n" or "r">.<random>.<choice>`: "r" if the request was a retry whose first
answer this process does not have.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Mapping
from typing import Final

_HASH_BYTES: Final = 12
_RANDOM_BYTES: Final = 6


def request_hash(route: str, body: bytes) -> str:
    """Return the name of equal requests, 16 characters.

    >>> request_hash("completions", b"{}") == request_hash("chat/completions", b"{}")
    False
    """
    found = hashlib.blake2b(body, digest_size=_HASH_BYTES, key=route.encode())
    return base64.urlsafe_b64encode(found.digest()).decode()


def new_call(request: str, *, is_retry: bool) -> str:
    """Return the name of a call with this hash; `call_id` adds the choice."""
    return f"{request}.{'r' if is_retry else 'n'}.{secrets.token_urlsafe(_RANDOM_BYTES)}"


def call_id(call: str, choice: int) -> str:
    """Return the call id of the turn of one choice."""
    return f"{call}.{choice}"


def superseded_turns(call_ids: Mapping[str, int]) -> frozenset[int]:
    """Return the turns whose call was repeated before the agent had its answer.

    A retry ("r") repeats the call of the same request before it.

    >>> sorted(superseded_turns({"aa.n.1.0": 0, "bb.n.2.0": 1, "aa.n.3.0": 2, "aa.r.4.0": 3}))
    [2]
    """
    before: dict[str, list[int]] = {}
    current: dict[str, str] = {}
    superseded: set[int] = set()
    for name, turn in sorted(call_ids.items(), key=lambda item: item[1]):
        call = name.rpartition(".")[0]
        request, kind, *_ = name.split(".")
        if current.get(request) != call:
            if kind == "r":
                superseded.update(before.get(request, ()))
            current[request], before[request] = call, []
        before[request].append(turn)
    return frozenset(superseded)
