"""A law of replays: a fold with rejections is the same, wherever a snapshot was taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit import config, sealed
from turnstream.batching.fold.readiness import RunFold
from turnstream.errors import BatchingError
from turnstream.records.events import encode_event
from turnstream.records.snapshots import PlannerSnapshot, decode_snapshot, encode_snapshot
from turnstream.types import (
    DeadlineFired,
    Event,
    GroupOpened,
    RewardPosted,
    RunClosed,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
)
from turnstream_server.batcher.planner.dead_letters import DeadLetterWriter
from turnstream_server.bus.core.events import EventEntry
from turnstream_server.bus.leadership.leadership import Term

CONFIG = config(2)
REFUSED = "g2"
"""The fold refuses to open this group."""


class StrictFold(RunFold):
    """A fold that refuses an event before anything changes."""

    def apply(self, event_id: str, event: Event) -> Any:
        """As a fold that bounds the samples of a group."""
        if isinstance(event, GroupOpened) and event.group_id == REFUSED:
            raise BatchingError("a group of too many samples")
        return super().apply(event_id, event)


keys = st.builds(
    TrajectoryKey, st.sampled_from(["g0", "g1", REFUSED]), st.integers(0, 2), st.integers(0, 1)
)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        GroupOpened,
        group_id=st.sampled_from(["g0", "g1", REFUSED]),
        prompt_uid=st.just(""),
        num_samples=st.integers(1, 3),
    ),
    keys.map(lambda key: sealed(key.group_id, sample=key.sample, attempt=key.attempt)),
    st.builds(TrajectoryAbandoned, key=keys, reason=st.just("")),
    st.builds(TrajectoryDied, key=keys, reason=st.just("")),
    st.builds(RewardPosted, key=keys, reward=st.just(1.0)),
    st.builds(DeadlineFired, group_id=st.sampled_from(["g0", "g1"])),
    st.just(RunClosed()),
)


@st.composite
def streams(draw: st.DrawFn) -> list[EventEntry]:
    """Events as they are stored, some of them damaged."""
    entries: list[EventEntry] = []
    for number, event in enumerate(draw(st.lists(events, max_size=30)), 1):
        record = encode_event(event)
        problem, posted_for = "", ""
        match draw(st.sampled_from(["sound", "sound", "byte", "cut", "field", "name"])):
            case "byte":
                place = draw(st.integers(0, len(record) - 1))
                record = record[:place] + bytes([record[place] ^ 4]) + record[place + 1 :]
            case "cut":
                record = record[: draw(st.integers(0, len(record) - 1))]
            case "field":
                record, problem = b"", "the entry of an event has no field r"
            case "name":
                posted_for = draw(st.text(max_size=5))
            case _:
                pass
        entries.append(EventEntry(f"{number}-0", record, posted_for, problem))
    return entries


def writer_of(rejected: set[str]) -> DeadLetterWriter:
    writer = DeadLetterWriter(Term(redis.asyncio.Redis(), "run", 1))
    writer._rejected.update(rejected)  # pyright: ignore[reportPrivateUsage]
    return writer


def fold_in(fold: RunFold, entries: Sequence[EventEntry], rejected: set[str]) -> set[str]:
    """Fold entries as a leader does; the ids of all that are rejected by then."""
    writer = writer_of(rejected)
    for entry in entries:
        event = writer.read(entry)
        if event is None:
            continue
        try:
            fold.apply(entry.event_id, event)
        except BatchingError as error:
            writer.reject_unfoldable(entry.event_id, event, error)
    return writer._rejected  # pyright: ignore[reportPrivateUsage]


def known(fold: RunFold) -> PlannerSnapshot:
    return PlannerSnapshot(
        position="1-0", step=0, manifest_hash="", next_row_id=0, fold=fold.snapshot()
    )


@settings(max_examples=300)
@given(entries=streams(), cut=st.integers(0, 30))
def test_fold_with_rejections_is_the_same_from_any_snapshot(
    entries: list[EventEntry], cut: int
) -> None:
    whole = StrictFold(CONFIG)
    decided = fold_in(whole, entries, set())

    first = StrictFold(CONFIG)
    fold_in(first, entries[:cut], set())
    stored = decode_snapshot(encode_snapshot(known(first)))
    second = StrictFold(CONFIG, stored.fold)
    again = fold_in(second, entries[cut:], decided)

    assert again == decided
    assert encode_snapshot(known(second)) == encode_snapshot(known(whole))


@settings(max_examples=300)
@given(entries=streams(), chosen=st.sets(st.integers(1, 30)))
def test_successor_skips_exactly_what_was_rejected(
    entries: list[EventEntry], chosen: set[int]
) -> None:
    # Another release could not read these; this one can, and passes over them all the same.
    others = {f"{number}-0" for number in chosen}
    without = StrictFold(CONFIG)
    fold_in(without, [each for each in entries if each.event_id not in others], set())

    successor = StrictFold(CONFIG)
    fold_in(successor, entries, others)

    assert encode_snapshot(known(successor)) == encode_snapshot(known(without))
