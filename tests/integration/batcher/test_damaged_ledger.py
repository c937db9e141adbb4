"""Damage of what `turnstream ledger` reads, field by field: one typed error, never a traceback."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
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


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "random": lambda value: RANDOM.randbytes(max(4, len(value))),
    "truncated": lambda value: value[: len(value) // 2],
    "empty": lambda _: b"",
    "flipped": _flip,
    "text": lambda _: b"no number",
    "long_number": lambda _: b"9" * 5000,
}


def damage_all(client: Any, key: str) -> Iterator[str]:
    """Damage each field or entry of a key, and then its type; yield the name of each damage."""
    before, kind = client.dump(key), client.type(key)
    values: dict[bytes, Any] = {}
    if kind == b"hash":
        values = client.hgetall(key)
    elif kind == b"stream":
        values = {entry_id: fields[b"r"] for entry_id, fields in client.xrange(key)}
    for field, value in values.items():
        for way in RANDOM.sample(sorted(DAMAGES), 2):
            if kind == b"hash":
                client.hset(key, field, DAMAGES[way](value))
            else:
                client.delete(key)
                for entry_id, record in values.items():
                    stored = DAMAGES[way](record) if entry_id == field else record
                    client.xadd(key, {"r": stored}, id=entry_id)
            yield f"{key} {field} {way}"
            client.restore(key, 0, before, replace=True)
    if before is not None:
        client.delete(key)
        client.rpush(key, "a list")
        yield f"{key} of another type"
        client.restore(key, 0, before, replace=True)


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
    names = keys.run_keys(run)
    payloads = [keys.trajectory_keys(run, name).meta for name in NAMES[:2]]
    with connect(url) as client:
        for key in [*(getattr(names, name) for name in READ), *payloads]:
            for place in damage_all(client, key):
                for what, call in reads.items():
                    try:
                        call()
                    except TurnstreamError as error:
                        num_raised += 1
                        is_named = "ts:{" in str(error) and "\n" not in str(error)
                        if isinstance(error, CorruptRecordError) and not is_named:
                            wrong.append(f"{place} {what}: unnamed: {error}")
                    except Exception as error:  # noqa: BLE001 - that is what is looked for
                        wrong.append(f"{place} {what}: {type(error).__name__} {error}")
    assert num_raised > 200
    return wrong
