"""Damage to one place of a stored run."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import redis

from fuzz.damage import Damage, damaged
from turnstream.store.client import keys

EVENTS, TURNS, PLAN, LEDGER = "events", "turns", "plan", "ledger"
KINDS = (EVENTS, TURNS, PLAN, LEDGER)

LEDGER_KEYS = ("ledger", "groups", "members", "batches", "past", "ended", "over", "held", "counts")
"""Hashes with the state of trajectories and groups."""


class Spot(NamedTuple):
    """A damaged place.

    Attributes:
        kind: one of KINDS.
        key: the damaged key.
        entry: id in a stream, or name of a field.
        part: the damaged part of the entry.
        damage: the bytes that replaced it.
    """

    kind: str
    key: str
    entry: str
    part: str
    damage: Damage

    def __str__(self) -> str:
        return f"{self.kind} {self.key} {self.entry} {self.part}: {self.damage.how}"


def damage_run(client: redis.Redis, run: str, kind: str, rng: random.Random) -> Spot | None:
    """Damage one place of this kind; None where the run has none."""
    names = keys.run_keys(run)
    if kind == EVENTS:
        return _damage_stream(client, kind, names.events, rng)
    if kind == PLAN:
        return _damage_stream(client, kind, names.plan, rng)
    if kind == TURNS:
        found: Any = sorted(client.keys(f"ts:{{{run}/*:turns"))
        return _damage_stream(client, kind, rng.choice(found).decode(), rng) if found else None
    present = [getattr(names, each) for each in LEDGER_KEYS if client.exists(getattr(names, each))]
    return _damage_hash(client, rng.choice(present), rng) if present else None


def _damage_stream(client: redis.Redis, kind: str, key: str, rng: random.Random) -> Spot | None:
    """Write a stream again with one entry damaged, in one transaction, under the same ids."""
    entries: Any = client.xrange(key)
    if not entries:
        return None
    place = rng.randrange(len(entries))
    entry_id, fields = entries[place]
    part, changed, damage = _damaged_fields(dict(fields), rng)
    entries[place] = (entry_id, changed)
    with client.pipeline(transaction=True) as pipeline:
        pipeline.delete(key)
        for each_id, each in entries:
            words = [word for pair in each.items() for word in pair]
            pipeline.execute_command("XADD", key, each_id, *words)
        pipeline.execute()
    return Spot(kind, key, entry_id.decode(), part, damage)


def _damaged_fields(
    fields: dict[bytes, bytes], rng: random.Random
) -> tuple[str, dict[bytes, bytes], Damage]:
    """Damage the value of one field, mostly the record, or its name."""
    name = b"r" if rng.random() < 0.8 else rng.choice(sorted(fields))
    if name not in fields or rng.random() < 0.1:
        name = rng.choice(sorted(fields))
        damage = damaged(name, rng)
        return f"name of {name!r}", {damage.data: fields[name]}, damage
    damage = damaged(fields[name], rng)
    return f"field {name!r}", {**fields, name: damage.data}, damage


def _damage_hash(client: redis.Redis, key: str, rng: random.Random) -> Spot | None:
    fields: Any = client.hgetall(key)
    name = rng.choice(sorted(fields))
    damage = damaged(fields[name], rng)
    client.hset(key, name, damage.data)
    return Spot(LEDGER, key, repr(name), "value", damage)
