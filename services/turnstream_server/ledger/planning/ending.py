"""The attempts of a group, and the writes that end those that are not trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from turnstream.store.client import keys
from turnstream_server.ledger.leadership.writes import Changes, Term, read_facts

ALL_READ: Final = 4_096
"""Attempts of all samples of a group that are read at once. Only granted refills, and releases
without that limit, lead to more."""


class Attempt(NamedTuple):
    """One attempt of a sample: its ledger entry and its entry in `held`, None where missing."""

    trajectory_id: str
    entry: bytes | None
    held: bytes | None

    @property
    def state(self) -> str:
        """Return the state in the ledger; empty for an attempt that was never opened."""
        return (self.entry or b"").partition(b":")[0].decode()

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that are reserved for an attempt that is not sealed."""
        held = self.held or b""
        return int(held[1:]) if held[:1] == b"r" and held[1:].isdigit() else 0

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of a sealed attempt; 0 where the entry is missing or damaged."""
        return int(self.held) if self.held is not None and self.held.isdigit() else 0


async def read_attempts(
    term: Term, group: str, *, num_samples: int, highest: int, also: Collection[str] = ()
) -> list[Attempt]:
    """Return the attempts of a group up to the highest known one, and the ids in `also`.

    A restarted store may have lost an attempt before a known one, so all of them are read. In a
    group of more than ALL_READ, an attempt is read if the one before it was opened.
    """
    found: list[Attempt] = []
    samples: Sequence[int] = range(num_samples)
    if num_samples * (highest + 1) <= ALL_READ:
        ids = [f"{group}/{sample}/{a}" for a in range(highest + 1) for sample in samples]
        found = await read_trajectories(term, ids)
    else:
        for attempt in range(highest + 1):
            some = await read_trajectories(term, [f"{group}/{s}/{attempt}" for s in samples])
            found += some
            if attempt:  # attempt 1 may be granted before attempt 0 was opened
                pairs = zip(samples, some, strict=True)
                samples = [sample for sample, each in pairs if each.entry is not None]
    seen = {each.trajectory_id for each in found}
    return found + await read_trajectories(term, [each for each in also if each not in seen])


async def read_trajectories(term: Term, ids: Sequence[str]) -> list[Attempt]:
    """Return some trajectories, a slice of ALL_READ in each round trip."""
    known = keys.run_keys(term.run)
    found: list[Attempt] = []
    for start in range(0, len(ids), ALL_READ):
        some = ids[start : start + ALL_READ]
        entries, held = await read_facts(
            term, ("HMGET", known.ledger, *some), ("HMGET", known.payload_bytes, *some)
        )
        found += (Attempt(*each) for each in zip(some, entries, held, strict=True))
    return found


def end_attempts(
    changes: Changes, attempts: Iterable[Attempt], *, becomes: Mapping[str, str], reason: str
) -> Counter[str]:
    """Add the end of those attempts whose state is a key of `becomes`; return counts by new state.

    The bytes that were reserved for attempts that were never opened are released.

    >>> changes = Changes()
    >>> one = Attempt("g/0/0", b"open:1:writer", None)
    >>> end_attempts(changes, [one], becomes={"open": "surplus"}, reason="no time")
    Counter({'surplus': 1})
    >>> list(changes.calls())  # doctest: +NORMALIZE_WHITESPACE
    [('FIELDS', 'ledger', ('g/0/0', b'=open:1:writer')),
     ('HSET', 'ledger', ('g/0/0', 'surplus:no time')), ('ZREM', 'leases', ('g/0/0',)),
     ('HINCRBY', 'counts', ('open', -1)), ('HINCRBY', 'counts', ('surplus', 1))]
    """
    numbers: Counter[str] = Counter()
    entries: list[str] = []
    leases: list[str] = []
    deadlines: list[str] = []
    reserved: list[str] = []
    num_bytes = 0
    ended: Counter[str] = Counter()
    for each in attempts:
        into = becomes.get(each.state)
        if into is not None:
            changes.expect("ledger", each.trajectory_id, each.entry)
            entries += (each.trajectory_id, f"{into}:{reason}")
            numbers[each.state] -= 1
            numbers[into] += 1
            ended[into] += 1
            if each.state == "open":
                leases.append(each.trajectory_id)
            elif each.state == "awaiting_reward":
                deadlines.append(f"reward:{each.trajectory_id}")
        elif each.entry is None:
            changes.expect("ledger", each.trajectory_id, None)
            if each.reserved_bytes:
                reserved.append(each.trajectory_id)
                num_bytes += each.reserved_bytes
    changes.write_each("HSET", "ledger", entries)
    changes.write_each("ZREM", "leases", leases)
    changes.write_each("ZREM", "deadlines", deadlines)
    changes.write_each("HDEL", "payload_bytes", reserved)
    changes.add("budget", "reserved", -num_bytes)
    for state, number in numbers.items():
        changes.add("counts", state, number)
    return ended
