"""Damage of what `turnstream ledger` reads, field by field: one typed error, never a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from rich.console import Console

from testkit import group, ids, wait_until
from turnstream.errors import CorruptRecordError, TurnstreamError
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.client.trajectory_names import keys_named
from turnstream.store.run.tasks import Prompt, add_prompts
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.bus.release.compact_records import find_past_step, read_past_batch
from turnstream_server.jobs.ledger import history_json, print_ledger

pytestmark = [pytest.mark.redis, pytest.mark.grpc, pytest.mark.timeout(600)]

SMALL = Upkeep(snapshot_events=1, snapshot_steps=1, fold_ended=2)
NAMES = ("open/0/0", "sealed/0/0", "g4/0/0", "g1/0/0", "ended/0/0")
"""Trajectories in different places: open, sealed, planned, in a compact record, and ended."""

READ = ("frontier", "config", "ledger", "counts", "batches", "conflicts", "held", "budget", "past")
READ += ("ended", "reasons", "events", "plan", "snapshot", "prompts", "times", "observers", "clock")
READ += ("letters", "rewards", "cold", "damaged", "again")
"""Keys of a run that the ledger reads."""

RANDOM = random.Random(7)


def _flip(value: bytes) -> bytes:
    place = RANDOM.randrange(len(value)) if value else 0
    return value[:place] + bytes([(value or b"0")[place] ^ 0x80]) + value[place + 1 :]


def _flip_low(value: bytes) -> bytes:
    place = RANDOM.randrange(len(value)) if value else 0
    return value[:place] + bytes([(value or b"0")[place] ^ 0x11]) + value[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "random": lambda value: RANDOM.randbytes(max(4, len(value))),
    "truncated": lambda value: value[: len(value) // 2],
    "empty": lambda _: b"",
    "flipped": _flip,
    "other_digit": _flip_low,
    "text": lambda _: b"no number",
    "long_number": lambda _: b"9" * 5000,
}


@dataclass(frozen=True)
class Place:
    """A field of a hash, an entry of a stream, or a whole key."""

    key: str
    field: bytes
    kind: str


@contextlib.contextmanager
def damage(client: redis.Redis, place: Place, how: Callable[[bytes], bytes]) -> Iterator[None]:
    """The place is damaged inside."""
    before: Any = client.dump(place.key)
    if place.kind == "hash":
        value: Any = client.hget(place.key, place.field)
        client.hset(place.key, place.field, how(value or b""))
    elif place.kind == "stream":
        _damage_entry(client, place, how)
    elif place.kind == "missing field":
        client.hdel(place.key, place.field)
    else:
        client.delete(place.key)
        client.execute_command(*OTHER_TYPES[place.field], place.key, *OTHER_ARGUMENTS[place.field])
    try:
        yield
    finally:
        client.restore(place.key, 0, before, replace=True)


OTHER_TYPES = {b"string": ("SET",), b"list": ("RPUSH",), b"set": ("SADD",), b"hash": ("HSET",)}
OTHER_ARGUMENTS = {b"string": ("x",), b"list": ("x",), b"set": ("x",), b"hash": ("x", "y")}


def _damage_entry(client: redis.Redis, place: Place, how: Callable[[bytes], bytes]) -> None:
    """Write the stream again with one entry damaged."""
    entries: Any = client.xrange(place.key)
    client.delete(place.key)
    for entry_id, fields in entries:
        if entry_id == place.field:
            fields = {b"r": how(fields[b"r"])}
        client.execute_command("XADD", place.key, entry_id, *sum(fields.items(), ()))


def places(client: redis.Redis, run: str) -> Iterator[Place]:
    """Every field and key of a run that the ledger reads."""
    names = keys.run_keys(run)
    payloads = [keys.trajectory_keys(run, name).meta for name in NAMES[:2]]
    for key in [*(getattr(names, name) for name in READ), *payloads]:
        found: Any = client
        kind = found.type(key).decode()
        if kind == "hash":
            for field in found.hkeys(key):
                yield Place(key, field, "hash")
                yield Place(key, field, "missing field")
        elif kind == "stream":
            for entry_id, _ in found.xrange(key):
                yield Place(key, entry_id, "stream")
        if kind != "none":
            for other in OTHER_TYPES:
                if other.decode() != kind:
                    yield Place(key, other, "type")


def calls(url: str, run: str) -> dict[str, Callable[[], Any]]:
    """Everything that reads the ledger."""

    def past(name: str) -> Any:
        with connect(url) as client:
            return find_past_step(client, run, keys_named(name)[-1])

    def batch() -> Any:
        with connect(url) as client:
            return read_past_batch(client, run, 1)

    console = Console(quiet=True)
    found: dict[str, Callable[[], Any]] = {
        "print_ledger": lambda: print_ledger(url, run, console),
        "batch": batch,
        "past": lambda: past(NAMES[3]),
    }
    for name in NAMES:
        found[f"history of {name}"] = lambda name=name: history_json(url, run, name)
    return found


@pytest.fixture
async def worn_run(house: Any) -> str:
    """A run with trajectories in every place that the ledger reads."""
    run = house.create_run(batch_groups=1, max_staleness=9, retain_checkpoints=1)
    trainer = await house.start_trainer(run, upkeep=SMALL)
    for step in range(1, 4):
        await house.publish(run, group(f"g{step}"))
        await trainer.committed(await trainer.stepped(await trainer.get(step)))
    await house.publish(run, group("g4"))
    await trainer.get(4)
    await asyncio.to_thread(_leave_others, house.url, run)
    return run


def _leave_others(url: str, run: str) -> None:
    names = keys.run_keys(run)
    with connect(url) as client:
        add_prompts(client, run, [Prompt(prompt_uid="p", payload=b"", num_samples=2)])
        with Publisher(url, run, writer="gen-1") as publisher:
            for name in ("ended", "ended2"):
                with publisher.group(name, 2):
                    pass
            wait_until(lambda: client.hlen(names.ended) > 0, describe="a record of ends")
            publisher.trajectory("open", 0, num_samples=2).append(ids("ab"), ids("c")).result(10)
            sealed = publisher.trajectory("sealed", 0, num_samples=2)
            sealed.append(ids("ab"), ids("c"))
            sealed.seal(reward=1.0)
        wait_until(lambda: client.hlen(names.past) > 0, describe="a compact record")
        client.hset(names.conflicts, mapping={"num": 1, "last": "g1/0/0: another turn"})
        client.hset(names.letters, "sealed/0/0", "1700000000000:100")
        client.hset(names.observers, "o", "1:99999999999999:60000")


async def test_every_damaged_field_is_a_typed_error_of_ledger(house: Any, worn_run: str) -> None:
    await house.close()  # no batcher repairs or meets the damage

    found = await asyncio.to_thread(_damage_all, house.url, worn_run)

    assert found == []


def _damage_all(url: str, run: str) -> list[str]:
    """Return the errors that are untyped, or name no key."""
    wrong: list[str] = []
    num_raised = 0
    reads = calls(url, run)
    with connect(url) as client:
        for call in reads.values():
            call()
        for place in [*places(client, run)]:
            ways = list(DAMAGES.items()) if place.kind in {"hash", "stream"} else [("", bytes)]
            for name, how in RANDOM.sample(ways, min(2, len(ways))):
                with damage(client, place, how):
                    for what, call in reads.items():
                        try:
                            call()
                        except CorruptRecordError as error:
                            num_raised += 1
                            if "ts:{" not in str(error) or "\n" in str(error):
                                wrong.append(f"{place} {name} {what}: unnamed: {error}")
                        except TurnstreamError:
                            num_raised += 1
                        except Exception as error:  # noqa: BLE001 - that is what is looked for
                            wrong.append(f"{place} {name} {what}: {type(error).__name__} {error}")
    assert num_raised > 200
    return wrong
