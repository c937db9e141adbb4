"""Refusals of a gateway: other runs, other roles, and records of junk.

The calls that are varied here are those that the SDK has sent in a session with every call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import sealed
from testkit.requests.sent_calls import SESSION_RUN, Sent, key_with, refusal
from testkit.services.gateway_thread import GatewayThread
from turnstream.generator.encode.checks import MAX_RECORD_BYTES
from turnstream.generator.requests import AppendTurns, Lease, PostedSeal, PostSeals, RenewLeases
from turnstream.generator.transport.messages import MEDIA_TYPE, call_of
from turnstream.records.events import encode_event
from turnstream.records.turns import encode_turn
from turnstream.store.run.groups import MAX_HEARTBEATS
from turnstream.types import ExtraPiece, StoredTurn, TrajectoryKey, VersionRun
from turnstream.wire.v1 import calls_pb2 as wire
from turnstream_server.gateway.rest.generators.plan import MAX_CALLS, MAX_READS
from turnstream_server.keys.records import ROLES

pytestmark = pytest.mark.redis

GENERATOR, OPERATOR, ANYBODY = {"produce"}, {"admin"}, {"produce", "read", "train"}

CALL_ROLES: Final[dict[str, set[str]]] = {
    **dict.fromkeys((each.name for each in wire.Call.DESCRIPTOR.fields), GENERATOR),
    "close_run": OPERATOR,
    "read_config": ANYBODY,
    "read_waits": ANYBODY,
    "await_wake": ANYBODY,
}
"""Every kind of call, and the roles of which a key needs one."""


def body_of(*requests: Any) -> wire.Calls:
    """Return the body with these requests of the writer "w"."""
    calls = [call_of(each) for each in requests]
    return wire.Calls(run="maze", writer="w", calls=calls)


# ------------------------------------------------------------------------------ keys


def test_every_call_needs_one_of_its_roles(sent: dict[str, list[Sent]]) -> None:
    assert {*sent} == {*CALL_ROLES}
    for name, (each, *_) in sent.items():
        assert "has the roles , needed is read" in refusal(each.alone(), key_with()), name
    for name, roles in CALL_ROLES.items():
        for role in ROLES:
            for each in sent[name][:20]:
                text = refusal(each.alone(), key_with(role))
                may = role == "admin" or role in roles
                assert (text == "") == may, (name, role, text)
                assert may or text.startswith("NOPERM key 'test' has the roles")


def test_every_call_is_bound_to_the_runs_of_its_key(sent: dict[str, list[Sent]]) -> None:
    others, its = key_with("admin", runs=["another"]), key_with("admin", runs=[SESSION_RUN])
    for calls in sent.values():
        for each in calls[:20]:
            text = refusal(each.alone(), others)
            assert text.startswith("BODY key 'test' may use the runs another"), text
            assert refusal(each.alone(), its) == ""


# ------------------------------------------------------------------------------ bodies


@pytest.fixture
def post(gateway: GatewayThread) -> Iterator[Callable[[bytes], httpx2.Response]]:
    """`post(body)` sends a body."""
    with httpx2.Client(base_url=gateway.base_url, headers={"Content-Type": MEDIA_TYPE}) as http:
        yield lambda body: http.post("/v1/calls", content=body)


def test_broken_body_is_a_problem_document(post: Any) -> None:
    many = wire.Calls(run="maze", calls=[wire.Call(read_config={})] * (MAX_CALLS + 1))
    reads = wire.Calls(run="maze", calls=[wire.Call(read_config={})] * (MAX_READS + 1))
    both = wire.Calls(run="maze", calls=[wire.Call(read_turns={}), wire.Call(read_config={})])
    cases = {
        b"x": "the body is no Calls",
        many.SerializeToString(): f"the body has {MAX_CALLS + 1} calls, at most {MAX_CALLS}",
        reads.SerializeToString(): f"the body has {MAX_READS + 1} reads, at most {MAX_READS}",
        both.SerializeToString(): "read_turns is one of 2 calls, expected no other call",
        wire.Calls(calls=[wire.Call(read_config={})]).SerializeToString(): "no run",
        b"\x32\x00" * 600_000: "the body has more than 262144 fields",
    }
    for body, detail in cases.items():
        answer = post(body)
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/problem+json"
        assert detail in answer.json()["detail"]


@given(body=st.binary(min_size=1, max_size=80), cut=st.integers(0, 80))
def test_any_body_is_calls_or_refused(body: bytes, cut: int) -> None:
    turns = AppendTurns("maze", "w", "g/0/0", 1, records=[body], is_sealed=bool(cut % 2))
    whole = body_of(turns, turns).SerializeToString()
    for each in (body, whole[:cut], whole[:cut] + body, whole):
        refusal(each)  # any other error than a refusal fails

    assert refusal(whole).startswith("INVALID ")


# ------------------------------------------------------------------------------ junk


def _records(message: Any) -> Iterator[tuple[Any, str, int]]:
    """Yield each stored record in a message: its owner, its field, its place in a list or -1."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_BYTES:
            places = range(len(value)) if field.is_repeated else [-1]
            yield from ((message, field.name, place) for place in places)
        elif field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                yield from _records(each)


def test_no_junk_in_a_record_is_sent(sent: dict[str, list[Sent]]) -> None:
    """Every record is cut, damaged, and exchanged."""
    turn = sent["append_turns"][0].call.append_turns.records[0]
    seal = sent["post_seals"][0].call.post_seals.seals[0].record
    num_records = 0
    for name in ("append_turns", "post_seals"):
        for each in sent[name][:20]:
            for number in range(len([*_records(each.call)])):
                body = each.alone()
                owner, field, place = [*_records(body.calls[0])][number]
                values = getattr(owner, field)
                record = values if place < 0 else values[place]
                damaged = record[:20] + bytes([record[20] ^ 1]) + record[21:]
                junk = [b"x", record[:-1], record + b"x", damaged, b"TS" + bytes(40)]
                for other in [*junk, seal if field == "records" else turn]:
                    if place < 0:
                        setattr(owner, field, other)
                    else:
                        values[place] = other
                    text = refusal(body)
                    assert text.startswith("INVALID "), (name, other[:40], text)
                num_records += 1

    assert num_records > 20


def test_record_of_another_trajectory_is_refused(sent: dict[str, list[Sent]]) -> None:
    posted = sent["post_seals"][0].alone()
    posted.calls[0].post_seals.seals[0].lease.key.group_id = "other"
    stored = next(each for each in sent["append_turns"] if each.call.append_turns.seal).alone()
    stored.calls[0].append_turns.lease.key.sample += 1

    assert refusal(posted).startswith("INVALID the record is one of")
    assert refusal(stored).startswith("INVALID the record is one of")


WRONG_TURNS: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": np.array([np.nan], np.float32)}, "logprobs"),
    ({"logprobs": np.array([1.0], np.float32)}, "logprobs"),
    ({"rewards": np.array([np.inf], np.float32)}, "rewards"),
    ({"token_ids": np.array([-1, 5], np.int32)}, "token_ids"),
    ({"version_runs": (VersionRun(-2, 1),)}, "version_runs"),
    ({"extras": {"x": ExtraPiece(0, np.array([np.nan], np.float32))}}, "extras"),
    ({"index": 3}, "turn 3 stands at 0"),
]


def test_turn_with_other_numbers_is_refused() -> None:
    plain = {"index": 0, "parent_turn": -1, "shared_tokens": 0, "num_response_tokens": 1}
    tokens = {"token_ids": np.array([1, 5], np.int32)}
    long = bytes(MAX_RECORD_BYTES + 1)
    records = {
        encode_turn(StoredTurn(**{**plain, **tokens, **fields})): message
        for fields, message in WRONG_TURNS
    }
    records[long] = f"turn 0 has {len(long)} bytes, more than {MAX_RECORD_BYTES}"
    for record, message in records.items():
        text = refusal(body_of(AppendTurns("maze", "w", "g/0/0", 1, records=[record])))
        assert text.startswith("INVALID "), message
        assert message in text


def test_large_calls_are_refused() -> None:
    beats = RenewLeases("", "w", [Lease("g/0/0", 1)] * (MAX_HEARTBEATS + 1))
    assert refusal(body_of(beats)) == "INVALID a call names 257 trajectories, at most 256"
    large = bytes(600_000)

    def turns(*records: bytes) -> AppendTurns:
        return AppendTurns("maze", "w", "g/0/0", 1, records=records)

    def seals(*records: bytes) -> PostSeals:
        posted = [PostedSeal("g/0/0", 1, False, 1, each) for each in records]
        return PostSeals("maze", "w", posted)

    for make in (turns, seals):
        for records, is_large in (([large, large], True), ([large], False)):
            text = refusal(body_of(make(*records)))
            assert ("records of one call have" in text) == is_large, (make.__name__, text)


WRONG_SEALS: list[tuple[dict[str, Any], str]] = [
    ({"reward": float("nan")}, "reward"),
    ({"turn_rewards": (float("inf"),)}, "turn_rewards"),
    ({"reward_components": {"style": float("nan")}}, "reward_components"),
    ({"metrics": {"length": 1e300}}, "metrics"),
    ({"tags": {"kind": "x" * 1_000}}, "tags"),
    ({"turns": (), "turn_rewards": (), "payload_crcs": ()}, "turns"),
    ({"awaits_reward": True, "reward": None}, "awaits_reward of g/0/0 differs"),
    ({"key": TrajectoryKey("g", 0, 2_000)}, "attempt: 2000 is not"),
]


def test_seal_with_other_values_is_refused() -> None:
    for fields, message in WRONG_SEALS:
        seal = dataclasses.replace(sealed("g"), **fields)
        posted = PostedSeal(seal.key.trajectory_id, 1, False, 100, encode_event(seal))
        text = refusal(body_of(PostSeals("maze", "w", [posted])))
        assert text.startswith("INVALID "), message
        assert message in text


def test_call_with_another_argument_is_refused(sent: dict[str, list[Sent]]) -> None:
    group = {"group_id": "g", "num_samples": 2, "num_needed": 2, "purpose": "train"}
    key = {"group_id": "g", "sample": 1}
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "sample": ({"open_group": {"group": group, "samples": [2]}}, "2 in a group of 2"),
        "attempts": (
            {"open_group": {"group": group, "samples": [0, 1], "attempts": [1]}},
            "2 samples and 1 attempts",
        ),
        "purpose": ({"open_group": {"group": {**group, "purpose": "x"}}}, "'x'"),
        "size": ({"open_group": {"group": {**group, "num_samples": 9_000}}}, "above 4096"),
        "name": ({"adopt": {"key": {**key, "group_id": ""}}}, "a name of 0 characters"),
        "long name": (
            {"adopt": {"key": {**key, "group_id": "g" * 600}}},
            "a name of 600 characters",
        ),
        "attempt": ({"adopt": {"key": {**key, "attempt": 1_000}}}, "attempt: 1000 is not"),
        "epoch": ({"abandon": {"lease": {"key": key, "epoch": 2**53}}}, "epoch"),
        "passed": ({"next_task": {"num_passed": 257}}, "num_passed"),
        "samples": ({"read_group": {"group_id": "g", "num_samples": 8_193}}, "num_samples"),
        "leftover": ({"close_run": {"leftover": "x"}}, "leftover"),
        "reward": ({"post_reward": {"reward": {"key": key}}}, "reward"),
        "position": ({"await_wake": {"wake_id": "x"}}, "wake_id"),
        "kind": ({}, "an older release"),
    }
    for name, (fields, message) in cases.items():
        text = refusal(wire.Calls(run="maze", writer="w", calls=[wire.Call(**fields)]))
        assert text.startswith("INVALID "), (name, text)
        assert message in text, (name, text)
    unnamed = sent["adopt"][0].alone()
    unnamed.writer = ""
    assert refusal(unnamed) == "INVALID the body has no writer, which a call needs"
