"""Requests of a generator as messages of the wire, and replies as its values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import NoPermissionError, OutOfMemoryError, ResponseError

from turnstream.errors import RecordError
from turnstream.generator.requests import (
    Abandon,
    Adopt,
    AppendTurns,
    AwaitWake,
    CloseRun,
    CountConflict,
    Lease,
    ListLapsed,
    NextTask,
    OpenGroup,
    PostedSeal,
    PostReward,
    PostSeals,
    ReadConfig,
    ReadGroup,
    ReadTurns,
    ReadWaits,
    RenewLeases,
    Reservation,
    Reserve,
)
from turnstream.generator.transport.messages import call_of, reply_of, request_of, value_of
from turnstream.store.client.replies import error_text
from turnstream.store.run.rewards import encode_reward
from turnstream.types import GroupOpened, Purpose, TrajectoryKey
from turnstream.wire.v1 import calls_pb2 as wire

RUN, WRITER = "maze~2", "gpu%207"


_GROUP = GroupOpened(group_id="task-7", prompt_uid="p", num_samples=4)
_ID = "task-7/3/1"
EXAMPLES: Final[tuple[Any, ...]] = (
    OpenGroup(RUN, WRITER, _GROUP, [_ID, "task-7/0/0"], prompt_number=9, is_again=True),
    AppendTurns(RUN, WRITER, _ID, 5, True, 2, [b"turn", b"seal"], True),
    PostSeals(RUN, WRITER, [PostedSeal(_ID, 5, True, 700, b"seal")]),
    Abandon(RUN, WRITER, _ID, 5, "crashed"),
    CountConflict(RUN, _ID, "other"),
    PostReward(RUN, *encode_reward(TrajectoryKey("task-7", 3, 1), 0.5, {"style": 1.0})),
    CloseRun(RUN, "done", "carry"),
    ReadConfig(RUN),
    RenewLeases(RUN, WRITER, [Lease(_ID, 5)]),
    Reserve(RUN, WRITER, [Reservation(_ID, 5, 9000)]),
    Adopt(RUN, WRITER, _ID),
    ListLapsed(RUN),
    ReadGroup(RUN, "task-7", 4),
    NextTask(RUN, True, 3),
    ReadWaits(RUN),
    ReadTurns(RUN, _ID),
    AwaitWake(RUN, "17-0", 5000),
)
WIRE_1: Final = {
    "OpenGroup": "0a240a160a067461736b2d37120170180420042a05747261696e120203001a02010020092801",
    "AppendTurns": "12220a100a0c0a067461736b2d371003180110051001180222047475726e2a047365616c",
    "PostSeals": "1a1f0a1d0a100a0c0a067461736b2d3710031801100510bc051a047365616c2001",
    "Abandon": "221b0a100a0c0a067461736b2d37100318011005120763726173686564",
    "CountConflict": "2a150a0c0a067461736b2d371003180112056f74686572",
    "PostReward": "322b0a290a0c0a067461736b2d371003180111000000000000e03f"
    "1a100a057374796c6511000000000000f03f",
    "CloseRun": "3a0d0a04646f6e6512056361727279",
    "ReadConfig": "4200",
    "RenewLeases": "4a120a100a0c0a067461736b2d37100318011005",
    "Reserve": "52170a150a100a0c0a067461736b2d3710031801100510a846",
    "Adopt": "5a0e0a0c0a067461736b2d3710031801",
    "ListLapsed": "6200",
    "ReadGroup": "6a0a0a067461736b2d371004",
    "NextTask": "720408011003",
    "ReadWaits": "7a00",
    "ReadTurns": "82010e0a0c0a067461736b2d3710031801",
    "AwaitWake": "8a01090a0431372d30108827",
}
"""The messages of the examples in version 1 of the wire: every later release reads them."""


_ODD = TrajectoryKey("a/ ~\u00e9#", 0, 0).trajectory_id
EDGES: Final[tuple[Any, ...]] = (
    OpenGroup(RUN, WRITER, replace(_GROUP, purpose=Purpose.EVAL), [], prompt_number=0),
    OpenGroup(
        RUN, WRITER, replace(_GROUP, group_id="a/ ~\u00e9#"), [_ODD], prompt_number=2**53 - 1
    ),
    AppendTurns(RUN, WRITER, _ODD, 2**53 - 1, False, 0, [], False, 2**64 - 1),
    AppendTurns(RUN, WRITER, _ODD, 0, False, 0, [b"turn"], False),
    PostSeals(RUN, WRITER, []),
    PostSeals(RUN, WRITER, [PostedSeal(_ID, 0, False, size, b"seal") for size in (None, 0)]),
    PostReward(RUN, *encode_reward(TrajectoryKey("g", 0), 0.5, {"a": 1.0, "b": 2.0})),
    CloseRun(RUN, "", None),
    RenewLeases(RUN, WRITER, []),
    NextTask(RUN, False, 0),
)
"""Requests with values that a message leaves out, and with odd names."""


def test_request_is_read_as_it_was() -> None:
    for request in (*EXAMPLES, *EDGES):
        data = call_of(request).SerializeToString()
        assert request_of(wire.Call.FromString(data), run=RUN, writer=WRITER) == request


def test_messages_of_the_first_version_are_read_and_written() -> None:
    for request in EXAMPLES:
        data = bytes.fromhex(WIRE_1[type(request).__name__])
        assert request_of(wire.Call.FromString(data), run=RUN, writer=WRITER) == request
        assert call_of(request).SerializeToString(deterministic=True) == data

    assert len(WIRE_1) == len(EXAMPLES) == len(wire.Call.DESCRIPTOR.fields)


def test_call_of_a_later_release_is_refused() -> None:
    with pytest.raises(RecordError, match="does not know this kind of call"):
        request_of(wire.Call.FromString(b"\xba\x06\x00"), run=RUN, writer=WRITER)


_errors = st.sampled_from(
    [
        ResponseError("WAIT [5-0] no capacity"),
        ResponseError("INVALID a\r\nb"),
        NoPermissionError("no"),
        OutOfMemoryError("full"),
    ]
)
_replies = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=40) | _errors,
    lambda each: st.lists(each, max_size=4),
    max_leaves=10,
)


def _comparable(reply: Any) -> Any:
    """Return a reply whose errors are their classes and texts."""
    if isinstance(reply, list):
        return [_comparable(each) for each in reply]
    return (type(reply), error_text(reply)) if isinstance(reply, ResponseError) else reply


@given(reply=_replies)
def test_reply_is_read_as_it_was(reply: Any) -> None:
    data = value_of(reply).SerializeToString()

    assert _comparable(reply_of(wire.Value.FromString(data))) == _comparable(reply)
