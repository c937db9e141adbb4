"""The law: whoever goes on from a snapshot comes to what the one before him would have come to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.config import BatchingConfig
from turnstream.batching.readiness import RunFold
from turnstream.batching.staleness import VersionSteps
from turnstream.errors import CorruptRecordError, UnknownFormatError
from turnstream.records.events import decode_event, encode_event
from turnstream.records.snapshots import PlannerSnapshot, decode_snapshot, encode_snapshot
from turnstream.testing import config, sealed
from turnstream.testing.strategies import events
from turnstream.types import (
    Event,
    GroupOpened,
    SealedTrajectory,
    TrajectoryAbandoned,
    TrajectoryKey,
    VersionAnnounced,
)

groups = st.sampled_from(["a", "b", "c"])
keys = st.builds(TrajectoryKey, groups, st.integers(0, 2), st.integers(0, 1))


@st.composite
def close_events(draw: st.DrawFn) -> Event:
    """Any kind of event, of one of three groups of one to three samples."""
    event: Any = draw(events())
    names = {field.name for field in dataclasses.fields(event)}
    changes: dict[str, Any] = {}
    if "key" in names:
        changes["key"] = draw(keys)
    if "group_id" in names:
        changes["group_id"] = draw(groups)
    if "num_samples" in names:
        changes["num_samples"] = draw(st.integers(1, 3))
        changes["num_needed"] = draw(st.integers(1, changes["num_samples"]))
    if "awaited" in names:
        changes["awaited"] = draw(st.none() | keys)
    if "num_refills" in names:
        changes["num_refills"] = draw(st.integers(0, 2))
    if "number" in names:
        changes["number"] = draw(st.integers(1, 3))
    if isinstance(event, SealedTrajectory):
        changes["reward"] = draw(st.sampled_from([0.0, 1.0, None]))
    return decode_event(encode_event(dataclasses.replace(event, **changes)))


acts = st.lists(st.one_of(close_events(), close_events(), close_events(), st.none()), max_size=40)
"""Events; None takes the first group that is ready."""


@st.composite
def policies(draw: st.DrawFn) -> BatchingConfig:
    """How groups finish."""
    policy: Any = draw(st.sampled_from(["drop", "train_short", "refill"]))
    return dataclasses.replace(
        config(2),
        deadline_policy=policy,
        max_refills=3 if policy == "refill" else 0,
        refill_fallback=draw(st.sampled_from(["drop", "train_short"])),
        surplus=draw(st.sampled_from(["drop", "keep"])),
        group_deadline_s=1,
        reward_deadline_s=1,
    )


def act(fold: RunFold, number: int, event: Event | None) -> Any:
    if event is None:
        return fold.take(fold.ready[:1])
    return fold.apply(f"{number}-0", event)


def through_the_record(fold: RunFold, settings: BatchingConfig) -> RunFold:
    snapshot = PlannerSnapshot(
        position="1-0", step=0, manifest_hash="", next_row_id=0, fold=fold.snapshot()
    )
    return decode_snapshot(encode_snapshot(snapshot)).restore_fold(settings)


@given(acts, policies())
def test_a_fold_that_went_through_its_snapshot_goes_on_as_if_nothing_had_been(
    life: list[Event | None], settings: BatchingConfig
) -> None:
    fold = RunFold(settings)
    others = [through_the_record(fold, settings)]

    for number, event in enumerate(life):
        told = act(fold, number, event)
        assert all(act(other, number, event) == told for other in others)
        others.append(through_the_record(fold, settings))

    assert all(other.snapshot() == fold.snapshot() for other in others)
    assert all(list(other.ready) == list(fold.ready) for other in others)


def test_a_snapshot_knows_all_that_the_fold_knows_but_its_configuration() -> None:
    fold = RunFold(config(2))

    assert {"_config", *fold.snapshot()} == set(vars(fold))


def test_an_object_of_a_class_that_is_not_named_is_refused_by_name() -> None:
    fold = RunFold(config(2))
    vars(fold)["_closed"] = config(2)

    with pytest.raises(TypeError, match="cannot hold a BatchingConfig"):
        through_the_record(fold, config(2))


def test_what_an_earlier_release_did_not_know_is_as_at_the_beginning() -> None:
    fold = RunFold(config(2))
    fold.apply("1-0", GroupOpened(group_id="a", prompt_uid="", num_samples=2))
    known = fold.snapshot()
    del known["_closed"]

    restored = RunFold.restore(config(2), known)

    assert (restored.num_open_groups, restored.closed) == (1, False)


announcements = st.lists(
    st.builds(
        VersionAnnounced,
        version=st.integers(0, 9),
        step=st.integers(0, 9),
        lineage=st.sampled_from(["main", "main-1"]),
    ),
    max_size=8,
)


@given(announcements, announcements)
def test_ages_of_tokens_are_judged_as_before_after_a_snapshot(
    before: list[VersionAnnounced], after: list[VersionAnnounced]
) -> None:
    versions = VersionSteps()
    for announced in before:
        versions.announce(announced)
    snapshot = PlannerSnapshot(
        position="1-0",
        step=0,
        manifest_hash="",
        next_row_id=0,
        fold={},
        versions=versions.steps,
        lineage=versions.lineage,
    )
    read = decode_snapshot(encode_snapshot(snapshot))

    restored = VersionSteps(read.versions, lineage=read.lineage)
    for announced in after:
        versions.announce(announced)
        restored.announce(announced)

    assert vars(restored) == vars(versions)


def test_what_only_another_release_knows_is_refused_by_name() -> None:
    snapshot = PlannerSnapshot(
        position="1-0", step=0, manifest_hash="", next_row_id=0, fold={"_moods": {}}
    )

    with pytest.raises(UnknownFormatError, match="_moods"):
        decode_snapshot(encode_snapshot(snapshot)).restore_fold(config(2))


def test_a_damaged_snapshot_is_refused() -> None:
    record = encode_snapshot(
        PlannerSnapshot(position="1-0", step=0, manifest_hash="", next_row_id=0, fold={})
    )

    with pytest.raises(CorruptRecordError):
        decode_snapshot(record[:-1])


def test_forgetting_leaves_what_is_ready_and_open() -> None:
    fold = RunFold(config(2))
    for name in ("ready", "dropped", "open"):
        fold.apply("1-0", GroupOpened(group_id=name, prompt_uid="", num_samples=1))
    fold.apply("2-0", sealed("ready"))
    fold.apply("3-0", TrajectoryAbandoned(key=TrajectoryKey("dropped", 0), reason=""))

    fold.forget(fold.decided)

    assert [group.group_id for group in fold.ready] == ["ready"]
    assert (fold.num_open_groups, fold.decided) == (1, ())
