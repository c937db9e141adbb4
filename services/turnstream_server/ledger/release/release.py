"""Release of finished steps: their payload, plans and ledger entries.

The order keeps the payload of every batch that the ledger can still offer. Every call may be sent
twice, and after a crash the next planner continues::

    advance_watermark  no session can ask for these steps any more
    release_payload    deletes the payload of every trajectory in them
    release_bytes      returns their bytes to the budget
    compact_batches       removes trajectories and groups from the ledger
    finish_batches     replaces the plans by compact records

Trajectories that ended untrained need no watermark: their payload is deleted, and `compact_ended`
replaces them by compact records when their groups are decided.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import redis.asyncio

from turnstream.batching.merge.plan import Manifest
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import no_such_run
from turnstream.store.client.scripts import Command, Script, run_commands_async
from turnstream.store.client.stored_values import parsed_number
from turnstream.store.run.configs import read_config_async
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.core.scan import hash_pages
from turnstream_server.ledger.leadership.writes import (
    Changes,
    Term,
    read_facts,
    write_decision,
    write_decisions,
)
from turnstream_server.ledger.planning.settling import read_trajectories
from turnstream_server.ledger.release.release_writes import (
    DROPPED,
    OVER,
    EndedFacts,
    Part,
    WatermarkFacts,
    advance,
    compact,
    counts_of,
    finish,
    has_ended,
    release_bytes,
    replace_ended,
)

TOMBSTONE_LEASES: Final = 15
"""Leases for which a released trajectory keeps a tombstone, to refuse late writers."""

SHORTEST_TOMBSTONE_S: Final = 900.0

_T = TypeVar("_T")

SLICE_WORDS: Final = 512
"""Words of the calls of one round trip: they take the event loop about 3 ms to pack."""

COMPACT_SLICE: Final = 256
"""Trajectories of one call: half a millisecond of the server."""

GROUP_SLICE: Final = 128
"""Groups of one call: a millisecond of the server, for each has a bucket of its own in `over`."""

STEP_SLICE: Final = 16
"""Steps whose plans one round trip replaces."""

_RELEASE_FIELDS: Final = ("stepped", "released", "folded", "ends", "checkpoints")

_RELEASE = Script("release_payload", "turnstream_server.ledger.release")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseState:
    """The progress of a run's release at one time.

    `checkpoint` is the newest one: no step after it can be released. `folded` is the newest step
    with a compact record. `num_ended` counts the trajectories that ever ended untrained and are no
    dead letters, and `num_entries` those in the ledger.
    """

    checkpoint: int
    released: int
    folded: int
    num_records: int
    snapshot_step: int
    num_ended: int
    num_ended_folded: int
    dead_bytes: int
    num_entries: int = 0


async def read_release_state(client: redis.asyncio.Redis, run: str) -> ReleaseState:
    """Return the progress of a run's release."""
    names = keys.run_keys(run)
    pipeline = client.pipeline(transaction=False)  # a full server refuses transactions
    pipeline.execute_command("HMGET", names.frontier, *_RELEASE_FIELDS)
    pipeline.execute_command("HGET", names.snapshot, "step")
    pipeline.execute_command("HMGET", names.counts, *DROPPED, "discarded", "dead_bytes")
    pipeline.execute_command("HVALS", names.reasons)
    pipeline.execute_command("HLEN", names.ledger)
    with translating():
        frontier, step, (*counts, dead_bytes), folded, num_entries = await pipeline.execute()
    if frontier[0] is None:
        raise no_such_run(run)
    return ReleaseState(
        checkpoint=parsed_number((frontier[4] or b"").rpartition(b",")[2] or b"0"),
        released=int(frontier[1] or 0),
        folded=int(frontier[2] or 0),
        num_records=int(frontier[3] or 0),
        snapshot_step=int(step or 0),
        num_ended=sum(int(count or 0) for count in counts),
        num_ended_folded=sum(map(int, folded)),
        dead_bytes=int(dead_bytes or 0),
        num_entries=num_entries,
    )


async def advance_watermark(term: Term, *, at_most: int | None = None) -> int:
    """Advance the low watermark to the steps before the last `retain_checkpoints`; return it.

    A live observer keeps the steps that it has not seen. `at_most` is a further limit.
    """
    watermark = 0

    def decide(facts: WatermarkFacts) -> Changes | None:
        nonlocal watermark
        watermark, changes = advance(facts, at_most=at_most)
        return changes

    await write_decision(term, lambda: _read_watermark(term), decide)
    return watermark


async def _read_watermark(term: Term) -> WatermarkFacts:
    known = keys.run_keys(term.run)
    (released, checkpoints), observers = await read_facts(
        term,
        ("HMGET", known.frontier, "released", "checkpoints"),
        ("HGETALL", known.observers),
    )
    revision, config = await read_config_async(term.client, term.run)
    return WatermarkFacts(
        released=released,
        checkpoints=checkpoints,
        revision=revision,
        num_kept=config.retain_checkpoints,
        observers=observers,
    )


async def release_payload(
    term: Term,
    trajectory_ids: Sequence[str],
    *,
    lease_s: float,
    abandoned: Container[str] = (),
) -> None:
    """Delete payload, and then return its bytes to the budget; the ledger must name it."""
    failpoint("release_payload.before")
    commands = (
        release_command(term.run, each, lease_s=lease_s, is_abandoned=each in abandoned)
        for each in trajectory_ids
    )
    for some in _in_slices(commands, lambda command: len(command.words)):
        for reply in await run_commands_async(term.client, some):
            if isinstance(reply, Exception):
                raise reply
    failpoint("release_bytes.before")
    for ids in _sliced(trajectory_ids, COMPACT_SLICE):
        await write_decision(term, lambda ids=ids: read_trajectories(term, ids), release_bytes)


def release_command(
    run: str, trajectory_id: str, *, lease_s: float, is_abandoned: bool = False
) -> Command:
    """Return the call that removes the payload of one trajectory; nothing is sent."""
    tombstone_ms = round(max(SHORTEST_TOMBSTONE_S, TOMBSTONE_LEASES * lease_s) * 1_000)
    text = "abandoned" if is_abandoned else "over"
    return _RELEASE(keys.trajectory_keys(run, trajectory_id), tombstone_ms, text)


async def compact_batches(term: Term, manifests: Sequence[Manifest]) -> None:
    """Remove the trajectories and groups of released steps from the ledger, in few round trips.

    Raises:
        ConflictError: a step is not released.
    """
    parts = (part for manifest in manifests for part in _parts(manifest))
    for some in _in_slices(parts, lambda part: len(part.names)):
        await write_decisions(
            term,
            lambda some=some: _read_parts(term, some),
            lambda facts, some=some: _fold(some, *facts),
        )


def _parts(manifest: Manifest) -> list[Part]:
    groups = [keys.encode_name(group.group_id) for group in manifest.groups]
    ids = [keys.trajectory_id(each.key) for group in manifest.groups for each in group.trajectories]
    step = manifest.step
    return [
        *(Part(step, some, are_groups=False) for some in _sliced(ids, COMPACT_SLICE)),
        *(Part(step, some, are_groups=True) for some in _sliced(groups, GROUP_SLICE)),
    ]


async def _read_parts(
    term: Term, parts: Sequence[Part]
) -> tuple[bytes | None, list[Sequence[bytes | None]]]:
    known = keys.run_keys(term.run)
    released, *entries = await read_facts(
        term,
        ("HGET", known.frontier, "released"),
        *(
            ("HMGET", known.groups if each.are_groups else known.ledger, *each.names)
            for each in parts
        ),
    )
    return released, entries


def _fold(
    parts: Sequence[Part], released: bytes | None, entries: Sequence[Sequence[bytes | None]]
) -> list[Changes]:
    pairs = zip(parts, entries, strict=True)
    folded = (compact(part, some, released=released) for part, some in pairs)
    return [each for each in folded if each is not None]


async def finish_batches(term: Term, records: Mapping[int, bytes]) -> None:
    """Replace the plans of consecutive released steps by their compact records.

    Raises:
        ConflictError: a step is not released, not the next one, or not in the snapshot.
    """
    for steps in _sliced(sorted(records), STEP_SLICE):
        some = {step: records[step] for step in steps}
        await write_decisions(
            term, lambda: _read_folded(term), lambda facts, some=some: finish(facts, some)
        )


async def _read_folded(term: Term) -> Sequence[bytes | None]:
    known = keys.run_keys(term.run)
    (released, folded), snapshot_step = await read_facts(
        term,
        ("HMGET", known.frontier, "released", "folded"),
        ("HGET", known.snapshot, "step"),
    )
    return released, folded, snapshot_step


async def find_ended(client: redis.asyncio.Redis, run: str) -> dict[str, str]:
    """Return the ledger entries of the untrained trajectories."""
    return {
        name.decode(): entry.decode()
        async for page in hash_pages(client, keys.run_keys(run).ledger)
        for name, entry in page.items()
        if has_ended(entry)
    }


async def finished_groups(
    client: redis.asyncio.Redis, run: str, group_names: Sequence[str]
) -> set[str]:
    """Return the (encoded) names of finished groups: planned, dropped, or compact."""
    states = await _group_states(client, run, group_names)
    return {name for name, state in states if state is None or state in OVER}


async def compact_groups(
    client: redis.asyncio.Redis, run: str, group_names: Sequence[str]
) -> set[str]:
    """Return the (encoded) names of groups of which only a fingerprint is left."""
    states = await _group_states(client, run, group_names)
    return {name for name, state in states if state is None}


async def compact_ended(
    term: Term, trajectory_ids: Sequence[str], *, number: int, record: bytes
) -> bool:
    """Replace trajectories that ended untrained by a compact record, once.

    Raises:
        ConflictError: `number` is not the next one, or a trajectory may still change.
    """
    written = await write_decision(
        term,
        lambda: _read_ended(term, trajectory_ids),
        lambda facts: replace_ended(facts, number=number, record=record),
    )
    return written is not None


async def _read_ended(term: Term, trajectory_ids: Sequence[str]) -> EndedFacts:
    known = keys.run_keys(term.run)
    names = dict.fromkeys(each.partition("/")[0] for each in trajectory_ids)
    newest, entries, groups = await read_facts(
        term,
        ("HGET", known.frontier, "ends"),
        ("HMGET", known.ledger, *trajectory_ids),
        ("HMGET", known.groups, *names),
    )
    found = dict(zip(trajectory_ids, entries, strict=True))
    reasons = [*counts_of(found)]
    counts, num_reasons = await read_facts(
        term, ("HMGET", known.reasons, *reasons), ("HLEN", known.reasons)
    )
    return EndedFacts(
        newest=newest,
        entries=found,
        groups=dict(zip(names, groups, strict=True)),
        reasons={each for each, count in zip(reasons, counts, strict=True) if count is not None},
        num_reasons=num_reasons,
    )


async def _group_states(
    client: redis.asyncio.Redis, run: str, group_names: Sequence[str]
) -> list[tuple[str, bytes | None]]:
    states: list[tuple[str, bytes | None]] = []
    for some in _sliced(group_names, COMPACT_SLICE):
        with translating():
            entries: Any = await client.execute_command("HMGET", keys.run_keys(run).groups, *some)
        found = [entry and entry.partition(b":")[2] for entry in entries]
        states += zip(some, found, strict=True)
    return states


def _in_slices(values: Iterable[_T], size: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Yield values in lists that end where the sum of their sizes reaches SLICE_WORDS."""
    some: list[_T] = []
    num_words = 0
    for value in values:
        some.append(value)
        num_words += size(value)
        if num_words >= SLICE_WORDS:
            yield some
            some, num_words = [], 0
    if some:
        yield some


def _sliced(values: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
