"""Facts about the changes that a leader writes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from turnstream_server.ledger.leadership.writes import Changes


def sums(changes: Changes | None) -> Counter[tuple[str, Any]]:
    """Return the number that each counter changes by, by key and field."""
    assert changes is not None
    found: Counter[tuple[str, Any]] = Counter()
    for name, key, words in changes.calls():
        if name == "HINCRBY":
            field, number = words
            found[key, field] += int(number)
    return found
