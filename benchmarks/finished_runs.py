"""Writing a run of finished trajectories as its services would, many commands at a time.

The real scripts train, commit and release. The results of earlier calls (open, seal, plan, abandon)
are written directly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import redis

from turnstream.records.compact import CompactBatch, encode_batch, encode_ends
from turnstream.store.client import keys
from turnstream.store.client.connection import Link
from turnstream.store.client.scripts import Command, Script, pack
from turnstream.types import TrajectoryKey
from turnstream_server.ledger.leadership.writes import Changes, Term, write_command
from turnstream_server.ledger.planning.settling import Attempt
from turnstream_server.ledger.release.release import COMPACT_SLICE, GROUP_SLICE
from turnstream_server.ledger.release.release_writes import (
    EndedFacts,
    Part,
    compact,
    finish,
    release_bytes,
    replace_ended,
)

RUN = "ledger"
TERM = Term(cast(Any, None), RUN, 1)
HELD = b"9000"
"""Bytes of each trajectory in the store."""


class Planned(NamedTuple):
    """A batch as a planner writes it."""

    step: int
    manifest_hash: str
    groups: list[str]
    members: list[TrajectoryKey]

    @property
    def ids(self) -> list[str]:
        """Return the names of its trajectories in the ledger."""
        return [f"{key.group_id}/{key.sample}/0" for key in self.members]


class Store:
    """Sends many commands at a time; raises the first refusal."""

    def __init__(self, url: str) -> None:
        self._link = Link(url)

    def run(self, *commands: Command | tuple[Any, ...]) -> list[Any]:
        """Send commands in one round trip, and return their replies."""
        words = [each.words if isinstance(each, Command) else each for each in commands]
        replies = self._link.exchange(pack(words), len(words))
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies


class RunWriter:
    """Writes a run batch by batch, as its services would."""

    def __init__(self, client: redis.Redis, store: Store) -> None:
        self._store = store
        self._names = keys.run_keys(RUN)
        names = {
            "leadership": ("acquire_leader", "leader_write"),
        }
        self._scripts = {
            name: Script(name, f"turnstream_server.ledger.{folder}")
            for folder, scripts in names.items()
            for name in scripts
        }
        for script in self._scripts.values():
            client.script_load(script.source)
        names = self._names
        store.run(
            self._call("acquire_leader", (names.frontier, names.leader), "bench", 10**9, 0, "")
        )
        session = ("session_epoch", 1, "session", "s", "session_token", ":", "dp_world_size", 1)
        store.run(("HSET", names.frontier, *session), ("HSET", names.sessions, "s", 1))
        self._num_planned = 0
        self._kept: list[Planned] = []
        self._ended: dict[str, str] = {}
        self._num_records = 0
        self._reasons: set[str] = set()
        self._folded: set[str] = set()

    def commit(self, batch: Planned) -> None:
        """Plan, train and commit a batch, and release the one before."""
        names, step = self._names, batch.step
        ids = batch.ids
        values = [word for each in ids for word in (each, f"planned:{step}")]
        groups = [word for each in batch.groups for word in (each, "8:planned")]
        self._num_planned += len(ids)
        acknowledged = (f"stepped:{step}", 9**13, f"committed:{step}", 9**13)
        ranks = ("stepped:0", f"{step}:{batch.manifest_hash}", "committed:0", step)
        self._store.run(
            ("HSET", names.ledger, *values),
            ("HSET", names.payload_bytes, *[word for each in ids for word in (each, HELD)]),
            ("HINCRBY", names.budget, "planned", int(HELD) * len(ids)),
            ("HSET", names.groups, *groups),
            ("HINCRBY", names.counts, "accepted", len(ids)),
            ("HINCRBY", names.counts, "planned", len(ids)),
            ("XADD", names.plan, f"{step}-0", "r", "m"),
            ("HSET", names.batches, step, f"{self._num_planned}:{batch.manifest_hash}"),
            ("HSET", names.times, f"planned:{step}", 1, *acknowledged),
            ("HSET", names.frontier, "planned", step, "stepped", step, "committed", step),
            ("HSET", names.ranks, *ranks),
            ("HINCRBY", names.frontier, "planned_groups", len(batch.groups)),
            ("HSET", names.frontier, "released", max(0, step - 1), "checkpoints", step),
            ("HSET", names.snapshot, "position", f"{step}-0", "step", step, "record", "s"),
        )
        self._kept.append(batch)
        if len(self._kept) > 1:  # two checkpoints are kept
            self._fold(self._kept.pop(0))

    def _fold(self, batch: Planned) -> None:
        record = encode_batch(
            CompactBatch(
                step=batch.step,
                manifest_hash=batch.manifest_hash,
                lineage="main",
                trajectories=tuple(batch.members),
                crcs=tuple(_crcs(batch)),
            )
        )
        ids, step = batch.ids, batch.step
        released = b"%d" % step
        folded = b"%d" % (step - 1) if step > 1 else None
        facts = (released, folded, b"%d" % (step + 1))
        entry = b"planned:%d" % step
        self._store.run(
            *(
                _write(release_bytes([Attempt(each, entry, HELD) for each in some]))
                for some in _sliced(ids, COMPACT_SLICE)
            ),
            *(
                _write(
                    compact(
                        Part(step, some, are_groups=False), [entry] * len(some), released=released
                    )
                )
                for some in _sliced(ids, COMPACT_SLICE)
            ),
            *(
                _write(
                    compact(
                        Part(step, some, are_groups=True),
                        [b"8:planned"] * len(some),
                        released=released,
                    )
                )
                for some in _sliced(batch.groups, GROUP_SLICE)
            ),
            *map(_write, finish(facts, {step: record})),
        )

    def drop(self, ended: dict[str, str]) -> None:
        """End trajectories of whole groups untrained; write a record of every full slice."""
        names = self._names
        groups = dict.fromkeys(each.partition("/")[0] for each in ended)
        self._store.run(
            ("HSET", names.ledger, *[word for pair in ended.items() for word in pair]),
            ("HSET", names.payload_bytes, *[word for each in ended for word in (each, HELD)]),
            ("HINCRBY", names.budget, "stored", int(HELD) * len(ended)),
            ("HSET", names.groups, *[word for each in groups for word in (each, "8:incomplete")]),
        )
        self._store.run(
            *(
                _write(release_bytes([Attempt(each, ended[each].encode(), HELD) for each in some]))
                for some in _sliced([*ended], COMPACT_SLICE)
            )
        )
        self._ended |= ended
        while len(self._ended) >= COMPACT_SLICE:
            self._compact_ended([*self._ended][:COMPACT_SLICE])

    def _compact_ended(self, ids: list[str]) -> None:
        entries = {each: self._ended.pop(each) for each in ids}
        stored = {each: entry.encode() for each, entry in entries.items()}
        groups = dict.fromkeys(each.partition("/")[0] for each in ids)
        changes = replace_ended(
            EndedFacts(
                newest=b"%d" % self._num_records if self._num_records else None,
                entries=stored,
                groups={each: None if each in self._folded else b"8:incomplete" for each in groups},
                reasons=self._reasons,
                num_reasons=len(self._reasons),
            ),
            number=self._num_records + 1,
            record=encode_ends({keys.parse_trajectory_id(each): entries[each] for each in ids}),
        )
        self._num_records += 1
        self._folded |= groups.keys()
        self._store.run(_write(changes))
        assert changes is not None
        self._reasons |= {str(words[0]) for _, key, words in changes.calls() if key == "reasons"}

    def _call(self, name: str, where: tuple[str, ...], *args: Any) -> Command:
        return self._scripts[name](where, *args)


def _write(changes: Changes | None) -> Command:
    assert changes is not None
    return write_command(TERM, changes)


def _crcs(batch: Planned) -> Iterator[int]:
    """Yield numbers without a pattern, as checksums are."""
    digest = hashlib.shake_128(b"%d" % batch.step).digest(4 * len(batch.members))
    for start in range(0, len(digest), 4):
        yield int.from_bytes(digest[start : start + 4], "little")


def _sliced(values: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
