"""Events as records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import sealed, shape
from testkit.strategies import events
from testkit.strategies.values import figures, names, optional_versions, rewards_of_trajectories
from turnstream.errors import CorruptRecordError, UnknownFormatError
from turnstream.records.encoding import EVALUATION, EVENT, read_header, write_frame
from turnstream.records.evals import decode_evaluation, encode_evaluation
from turnstream.records.events import decode_event, encode_event
from turnstream.types import (
    EvalGroup,
    EvalResult,
    Event,
    GroupOpened,
    RunClosed,
    SealedTrajectory,
    Spread,
    TrajectoryKey,
)
from turnstream.wire.v1 import records_pb2 as wire

NEWER = b"\x9a\x06\x05newer"
"""A field that this release does not know."""


@given(event=events())
def test_decoded_event_is_the_encoded_one(event: Event):
    assert decode_event(encode_event(event)) == event


def test_named_values_are_sorted():
    tags = {f"tag {number:03}": str(number) for number in range(100)}
    event = replace(sealed(), tags=tags)
    reordered = replace(sealed(), tags=dict(reversed(tags.items())))

    record = encode_event(reordered)

    assert record == encode_event(event)
    decoded = decode_event(record)
    assert isinstance(decoded, SealedTrajectory)
    assert list(decoded.tags) == list(tags)


def test_unknown_fields_are_ignored_and_unknown_kinds_refused():
    event = RunClosed(reason="enough")
    header = read_header(encode_event(event), kind=EVENT)

    assert decode_event(write_frame(EVENT, header + NEWER)) == event
    with pytest.raises(UnknownFormatError, match=r"newer release .*, with an unknown kind"):
        decode_event(write_frame(EVENT, NEWER))


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (GroupOpened(group_id="g0", prompt_uid="p", num_samples=1), "purpose"),
        (RunClosed(reason="enough"), "leftover"),
    ],
)
def test_unknown_text_is_of_a_newer_release_except_a_status(event: Event, field: str):
    message = wire.Event.FromString(read_header(encode_event(event), kind=EVENT))
    setattr(getattr(message, message.WhichOneof("event") or ""), field, "distil")

    with pytest.raises(UnknownFormatError, match=r"newer release .*, with the value 'distil'"):
        decode_event(write_frame(EVENT, message.SerializeToString()))

    setattr(getattr(message, message.WhichOneof("event") or ""), field, "")
    seal = wire.Event.FromString(read_header(encode_event(sealed()), kind=EVENT))
    seal.trajectory_sealed.status = "bored"

    with pytest.raises(CorruptRecordError, match="'bored' is no status"):
        decode_event(write_frame(EVENT, seal.SerializeToString()))
    with pytest.raises(CorruptRecordError, match="a text is empty"):
        decode_event(write_frame(EVENT, message.SerializeToString()))


LEFT_OUT = shape(2, 3, trained=0, is_left_out=True)


def test_version_of_an_event_says_whether_it_leaves_turns_out() -> None:
    plain = encode_event(sealed(turns=[shape(2, 3)]))
    shorter = encode_event(sealed(turns=[LEFT_OUT, shape(2, 3, parent=0, shared=2)]))

    assert (plain[3], shorter[3]) == (0, 1)
    for record in (plain, shorter, encode_event(RunClosed())):
        header = read_header(record, kind=EVENT)
        with pytest.raises(CorruptRecordError, match=r"of version [01]"):
            decode_event(write_frame(EVENT, header, version=1 - record[3]))


@pytest.mark.parametrize(
    ("reason", "event"),
    [
        ("turn 0 of a seal has the parent 0", sealed(turns=[shape(2, 3, parent=0)])),
        ("turn 1 of .* parent -2", sealed(turns=[shape(2, 3), shape(2, 3, parent=-2)])),
        ("shares 6 tokens of 5", sealed(turns=[shape(2, 3), shape(2, 3, parent=0, shared=6)])),
        ("shares 1 tokens of 0", sealed(turns=[shape(2, 3, shared=1)])),
        ("trains 4 of 3 response tokens", sealed(turns=[shape(2, 3, trained=4)])),
        ("has 2147483651 tokens, more than", sealed(turns=[shape(2**31, 3)])),
        (
            "trains 3 tokens, and its versions sampled 2",
            sealed(turns=[shape(2, 3)], turn_versions=[[(1, 1), (2, 1)]]),
        ),
        ("has 10001 turns, more than 10000", sealed(turns=[shape(1, 1)] * 10_001)),
        ("of version 1 leaves out 1 of its 1 turns", sealed(turns=[LEFT_OUT])),
        ("left out, and has 1 trained", sealed(turns=[shape(2, 3), shape(1, 1, is_left_out=True)])),
        (
            "left out, and has 0 trained tokens and the reward 0.5",
            sealed(turns=[LEFT_OUT, shape(2, 3)], turn_rewards=[0.5, 0.0]),
        ),
        (
            "turn 1 of a seal continues turn 0, which is left out",
            sealed(turns=[LEFT_OUT, shape(2, 3, parent=0, shared=3)]),
        ),
        ("no group has this name", replace(sealed(), key=TrajectoryKey("", 0))),
        ("attempt 2147483648 .* is not in", replace(sealed(), key=TrajectoryKey("g", 0, 2**31))),
        (
            "a group of 2 samples needs 3 of them",
            GroupOpened(group_id="g", prompt_uid="", num_samples=2, num_needed=3),
        ),
    ],
)
def test_impossible_event_is_refused(reason: str, event: Event):
    with pytest.raises(CorruptRecordError, match=reason):
        decode_event(encode_event(event))


counts = st.integers(0, 2**40)
spreads = st.builds(Spread, num=counts, mean=rewards_of_trajectories, squares=st.floats(0, 1e9))
groups = st.builds(
    EvalGroup,
    group_id=names,
    prompt_uid=names,
    version=optional_versions,
    num_trajectories=counts,
    num_lost=counts,
    reward=spreads,
    best=st.none() | rewards_of_trajectories,
)
results = st.builds(
    EvalResult,
    version=optional_versions,
    num_groups=counts,
    num_trajectories=counts,
    num_lost=counts,
    reward=spreads,
    best=spreads,
    figures=figures,
    groups=st.just(()),
)


@given(value=groups | results)
def test_decoded_evaluation_is_the_encoded_one(value: EvalGroup | EvalResult) -> None:
    kind: Any = type(value)

    assert decode_evaluation(kind, encode_evaluation(value)) == value


@pytest.mark.parametrize("kind", [EvalGroup, EvalResult])
@pytest.mark.parametrize("header", [b"", b"[]", b"{}", b'{"version": 1, "reward": 3}'])
def test_record_that_is_no_result_is_refused(kind: Any, header: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        decode_evaluation(kind, write_frame(EVALUATION, header))
