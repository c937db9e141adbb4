"""Events that a leader reads: accepted ones can be planned, others are rejected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import config, sealed
from testkit.runs.folds import restored
from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.planning.plan_batch import plan_batch
from turnstream.errors import RecordError
from turnstream.records.encoding import EVENT, write_frame
from turnstream.records.events import encode_event
from turnstream.types import GroupOpened, RewardPosted, RunClosed, TrajectoryKey
from turnstream.wire.v1 import records_pb2 as wire
from turnstream_server.batcher.planner.decisions import UnreadableEvent, read_entry
from turnstream_server.ledger.core.scan import EventEntry
from turnstream_server.ledger.planning.manifests import encode_for_store

SEAL = sealed("g", sample=1)
KEY = TrajectoryKey("g", sample=1)
DAMAGED = encode_event(SEAL)[:-1] + b"x"
NEWER_KIND = write_frame(EVENT, b"")


def entry(record: bytes, posted_for: str = "") -> EventEntry:
    return EventEntry("1-0", record, posted_for)


@pytest.mark.parametrize("event", [SEAL, RewardPosted(key=KEY, reward=1.0)])
def test_event_posted_for_its_own_trajectory_is_accepted(event: object) -> None:
    record = encode_event(event)  # type: ignore[arg-type]  # one of the union

    assert read_entry(entry(record, "g/1/0")) == event


@pytest.mark.parametrize(
    ("record", "posted_for", "key", "words"),
    [
        pytest.param(DAMAGED, "g/1/0", KEY, "checksum", id="damaged"),
        pytest.param(DAMAGED, "", None, "checksum", id="damaged, posted for nothing"),
        pytest.param(
            encode_event(SEAL), "g/2/0", KEY._replace(sample=2), "sample=1", id="names another"
        ),
        pytest.param(encode_event(RunClosed()), "g/1/0", KEY, "is a RunClosed", id="no seal"),
        pytest.param(NEWER_KIND, "g/1/0", KEY, "", id="unknown kind"),
        *(
            pytest.param(encode_event(SEAL), name, KEY, name, id=f"field t is {name}")
            for name in ("g/1", "g/1/x", "g/+1/0", "g/01/0", "g/-1/0", "/1/0")
        ),
    ],
)
def test_unreadable_event_ends_the_trajectory_that_it_or_its_record_names(
    record: bytes, posted_for: str, key: TrajectoryKey | None, words: str
) -> None:
    found = read_entry(entry(record, posted_for))

    assert isinstance(found, UnreadableEvent)
    assert found.key == key
    assert words in found.reason


def test_unknown_kind_of_event_that_was_posted_for_nothing_stops_the_leader() -> None:
    with pytest.raises(RecordError, match="newer release"):
        read_entry(entry(NEWER_KIND))


CONFIGS = (
    config(1),
    replace(config(1), reward_source="sum_of_turns", over_long="alone"),
    replace(config(1), merge=False, estimator="opo"),
)
numbers = st.sampled_from([0, 1, 2, 5, 2**31 - 1, 2**31, 2**32 - 1])
large = st.sampled_from([0, 1, 2**31, 2**63 - 1])
reals = st.sampled_from([0.0, 1.0, -1.0, 1e30, 1e308, float("inf"), float("-inf"), float("nan")])


@st.composite
def turns(draw: st.DrawFn, index: int) -> wire.TurnShape:
    response = draw(numbers)
    trained = draw(st.sampled_from([0, response, draw(numbers)]))
    runs = [wire.VersionRun(version=draw(large), count=trained)] if draw(st.booleans()) else []
    return wire.TurnShape(
        parent_turn=draw(st.integers(-1, index)),
        shared_tokens=draw(numbers),
        num_new_prompt_tokens=draw(numbers),
        num_response_tokens=response,
        num_trained_tokens=trained,
        reward=draw(reals),
        payload_crc=draw(numbers),
        trained_versions=runs,
    )


@st.composite
def seals(draw: st.DrawFn) -> bytes:
    """A seal of one sample that says anything under a right checksum."""
    names = st.dictionaries(st.sampled_from(["a", "b", ""]), reals, max_size=2)
    message: Any = wire.TrajectorySealed(
        key=wire.TrajectoryKey(group_id="g", sample=0, attempt=draw(numbers)),
        lease_epoch=draw(numbers),
        status=draw(st.sampled_from(["completed", "truncated"])),
        reward=draw(reals),
        reward_components=draw(names),
        turns=[draw(turns(index)) for index in range(draw(st.integers(0, 3)))],
        oldest_version=draw(large),
        newest_version=draw(large),
        num_payload_bytes=2**64 - 1,
        metrics=draw(names),
        sampling=draw(names),
        tags={"env": "maze"},
    )
    return write_frame(EVENT, wire.Event(trajectory_sealed=message).SerializeToString())


@given(record=seals(), number=st.integers(0, len(CONFIGS) - 1))
def test_accepted_seal_can_be_folded_planned_and_stored(record: bytes, number: int) -> None:
    # Lengths of 2**32 - 1 tokens were folded, and overflowed in every plan that was made of them.
    of = CONFIGS[number]
    event = read_entry(EventEntry("2-0", record, ""))
    if isinstance(event, UnreadableEvent):
        return
    fold = RunFold(of)
    fold.apply("1-0", GroupOpened(group_id="g", prompt_uid="", num_samples=1))

    fold.apply("2-0", event)

    assert restored(fold, of).num_ready == fold.num_ready
    if fold.ready:
        manifest = plan_batch(
            fold.ready,
            config=of,
            run="run",
            step=1,
            lineage="main",
            previous_hash="",
            first_row_id=0,
            config_revision=1,
        )
        encode_for_store(manifest)
