"""Refusals of a gateway: other commands, other runs, other roles, and records of junk.

The commands that are varied here are those that the SDK has sent in a session with every call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from testkit import sealed
from testkit.scripts import package_of, script, script_files
from testkit.store_commands import SESSION_RUN, key_with, refusal, words_of
from turnstream.generator.encode.checks import MAX_RECORD_BYTES
from turnstream.records.events import encode_event
from turnstream.records.turns import encode_turn
from turnstream.store.client import keys
from turnstream.store.client.scripts import Script
from turnstream.types import ExtraPiece, StoredTurn, TrajectoryKey, VersionRun
from turnstream_server.keys.records import ROLES

pytestmark = pytest.mark.redis

GENERATOR, OPERATOR, ANYBODY = {"produce"}, {"admin"}, {"produce", "read", "train"}

SCRIPT_ROLES: dict[str, set[str]] = {
    "abandon": GENERATOR,
    "add_prompts": OPERATOR,
    "adopt": GENERATOR,
    "append": GENERATOR,
    "create_run": OPERATOR,
    "heartbeat": GENERATOR,
    "list_lapsed": GENERATOR,
    "next_task": GENERATOR,
    "note_conflict": GENERATOR,
    "open_group": GENERATOR,
    "post_reward": GENERATOR,
    "post_sealed": GENERATOR,
    "read_config": ANYBODY,
    "read_group": GENERATOR,
    "read_waits": ANYBODY,
    "reserve": GENERATOR,
    "revise_config": OPERATOR,
    "set_closed": OPERATOR,
    "set_paused": OPERATOR,
}
"""Scripts that a key may call, and its roles. All others are refused."""

COMMAND_ROLES: dict[str, set[str]] = {
    "CONFIG GET": ANYBODY,
    "GET incarnation": ANYBODY,
    "HGET config": ANYBODY,
    "HGETALL config": ANYBODY,
    "HMGET frontier": ANYBODY,
    "HMGET meta": GENERATOR,
    "HMGET prompts": ANYBODY,
    "INFO server": ANYBODY,
    "PING": ANYBODY,
    "SADD runs": OPERATOR,
    "SCRIPT LOAD": ANYBODY,
    "SMEMBERS runs": ANYBODY,
    "TIME": ANYBODY,
    "XADD news": OPERATOR,
    "XRANGE turns": GENERATOR,
    "XREAD versions": ANYBODY,
    "XREAD wake": ANYBODY,
    "XREVRANGE versions": ANYBODY,
    "ZCARD again": ANYBODY,
    "ZREVRANGEBYSCORE batchers": {"train"},
}
"""Commands that the SDK sends without a script."""


# ------------------------------------------------------------------------------ whitelist


def test_session_has_sent_every_command_of_the_tables(sent: Any) -> None:
    assert {*sent} == {*SCRIPT_ROLES, *COMMAND_ROLES}


def test_every_other_script_is_refused() -> None:
    refused: set[str] = set()
    for name, path in script_files().items():
        each = Script(name, package_of(path))
        call = [b"EVALSHA", each.sha.encode(), b"1", b"ts:{maze}:config"]
        load = [b"SCRIPT", b"LOAD", each.source.encode()]
        texts = [refusal(call), refusal(load)]
        if name in SCRIPT_ROLES:
            assert not texts[1], name
        elif all(text.startswith("NOPERM ") for text in texts):
            refused.add(name)

    assert {*script_files()} == refused | {*SCRIPT_ROLES}


def test_every_command_needs_one_of_its_roles(sent: Any) -> None:
    for name, roles in {**SCRIPT_ROLES, **COMMAND_ROLES}.items():
        for role in ROLES:
            for words in sent[name][:20]:
                text = refusal(words, key_with(role))
                may = role == "admin" or role in roles
                # No secrets of a run need no role: the load of a script, the clock.
                is_public = name in ("PING", "TIME", "SCRIPT LOAD", "INFO server", "CONFIG GET")
                assert (text == "") == (may or is_public), (name, role, text)
                assert may or is_public or text.startswith("NOPERM key 'test' has the roles")


def test_every_command_is_bound_to_the_runs_of_its_key(sent: Any) -> None:
    others, its = key_with("admin", runs=["another"]), key_with("admin", runs=[SESSION_RUN])
    shared = {"PING", "TIME", "SCRIPT LOAD", "INFO server", "CONFIG GET", "SMEMBERS runs"}
    shared |= {"ZREVRANGEBYSCORE batchers"}
    for name, calls in sent.items():
        for words in calls[:20]:
            text = refusal(words, others)
            assert text.startswith("NOPERM key 'test' may use the runs another") == (
                name not in shared
            ), (name, text)
            assert refusal(words, its) == ""


def test_every_key_of_a_command_is_of_one_run(sent: Any) -> None:
    for name, (words, *_) in sent.items():
        places = [n for n, word in enumerate(words) if word.startswith(b"ts:{")]
        for place in places:
            part = words[place].rpartition(b":")[2]
            for other in (
                b"ts:{another}:" + part,
                words[place].replace(b"}:", b"}~2:"),
                words[place].replace(b"maze", b"m%61ze"),
                words[place].replace(b":{", b":{x{"),
                words[place] + b"x",
                words[place].replace(part, b"leases2"),
                b"tk:keys",
                b"tm:{S:train:0}:model",
                b"",
                b"\xff",
            ):
                changed = [*words[:place], other, *words[place + 1 :]]
                text = refusal(changed, key_with("admin", runs=[SESSION_RUN]))
                is_later = other.startswith(words[place][:-3].partition(b"}")[0] + b"}~2")
                if len(places) == 1 and is_later and not name.startswith("create"):
                    continue  # the next run of the same name has the same rights
                assert text.startswith(("NOPERM ", "INVALID ")), (name, changed)


def test_keys_of_a_script_are_in_its_order(sent: Any) -> None:
    for name in SCRIPT_ROLES:
        words = sent[name][0]
        num_keys = int(words[2])
        for place in range(3, 2 + num_keys):
            swapped = [*words]
            swapped[place], swapped[place + 1] = words[place + 1], words[place]
            assert refusal(swapped).startswith("NOPERM the keys of script"), name
        if num_keys > 1:
            short = [*words[:2], b"%d" % (num_keys - 1), *words[3:]]
            assert refusal(short).startswith("NOPERM the keys of script"), name


@pytest.mark.parametrize(
    "words",
    [
        ["FLUSHALL"],
        ["KEYS", "*"],
        ["EVAL", "return 1", "0"],
        ["EVALSHA"],
        ["SCRIPT", "FLUSH"],
        ["CONFIG", "GET", "*"],
        ["CONFIG", "GET", "requirepass"],
        ["CONFIG", "SET", "appendfsync", "no"],
        ["INFO"],
        ["INFO", "all"],
        ["GET", "ts:{maze}:config"],
        ["GET", "tk:keys"],
        ["HGETALL", "tk:keys"],
        ["HGETALL", "ts:{maze}:frontier"],
        ["HMGET", "ts:{maze}:frontier", "session_token"],
        ["HMGET", "ts:{maze/g/0/0}:meta", "writer"],
        ["SMEMBERS", "ts:other"],
        ["SADD", "ts:runs", "a", "b"],
        ["SADD", "ts:runs", "a%zz"],
        ["XADD", "ts:news", "MAXLEN", "~", "0", "*", "n", "maze"],
        ["XREAD", "STREAMS", "ts:{maze}:wake", "0-0"],
        ["XREAD", "BLOCK", "1", "STREAMS", "ts:{maze}:events", "0-0"],
        ["XREAD", "BLOCK", "1", "STREAMS", "ts:{maze}:wake", "ts:{maze}:versions", "0-0", "0-0"],
        ["XRANGE", "ts:{maze}:events", "-", "+"],
        ["WATCH", "ts:{maze}:config"],
        ["SUBSCRIBE", "x"],
        ["AUTH", "x"],
        [""],
    ],
    ids=" ".join,
)
def test_other_command_is_refused(words: list[str]) -> None:
    text = refusal([each.encode() for each in words])

    assert text.startswith(("NOPERM ", "INVALID ")), text


# ------------------------------------------------------------------------------ junk


def test_no_junk_in_a_record_is_sent(sent: Any) -> None:
    """Every record is cut, damaged, exchanged and moved to another trajectory."""
    records = {
        name: next(words for words in calls if _places_of_records(words))
        for name, calls in sent.items()
        if any(_places_of_records(words) for words in calls)
    }
    turn = next(
        words[n]
        for words in sent["append"]
        for n in _places_of_records(words)
        if words[n][2:3] == b"T"
    )
    seal = sent["post_sealed"][0][-1]

    assert {*records} == {
        *("append", "post_sealed", "open_group", "abandon", "post_reward", "set_closed")
    }
    for name, words in records.items():
        for place in _places_of_records(words):
            record = words[place]
            damaged = record[:20] + bytes([record[20] ^ 1]) + record[21:]
            junk = [b"", b"x", record[:-1], record + b"x", damaged, b"TS" + bytes(40)]
            junk += [turn if record != turn else seal]
            for other in junk:
                if other == record:
                    continue
                text = refusal([*words[:place], other, *words[place + 1 :]])
                assert text.startswith("INVALID "), (name, other[:40], text)


def _places_of_records(words: Sequence[bytes]) -> list[int]:
    return [n for n, word in enumerate(words) if word[:2] == b"TS" and word[2:3] in b"TE"]


def test_record_of_another_trajectory_is_refused(sent: Any) -> None:
    for name, at in (("post_sealed", 13), ("abandon", 7), ("post_reward", 12)):
        words = sent[name][0]
        assert refusal(words) == ""
        text = refusal([*words[:at], b"other/0/0", *words[at + 1 :]])
        assert text.startswith("INVALID the record"), (name, text)
    sealed = next(words for words in sent["append"] if words[7] == b"1")
    key = sealed[3].partition(b"/")[2].partition(b"}")[0]
    moved = [word.replace(key, b"other/0/0") for word in sealed[:5]] + sealed[5:]
    assert refusal(moved).startswith("INVALID the record is one of")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": np.array([np.nan], np.float32)}, "logprobs"),
        ({"logprobs": np.array([1.0], np.float32)}, "logprobs"),
        ({"rewards": np.array([np.inf], np.float32)}, "rewards"),
        ({"token_ids": np.array([-1, 5], np.int32)}, "token_ids"),
        ({"version_runs": (VersionRun(-2, 1),)}, "version_runs"),
        ({"extras": {"x": ExtraPiece(0, np.array([np.nan], np.float32))}}, "extras"),
        ({"index": 3}, "turn 3 stands at 0"),
    ],
)
def test_turn_with_other_numbers_is_refused(fields: dict[str, Any], message: str) -> None:
    plain = {"index": 0, "parent_turn": -1, "shared_tokens": 0, "num_response_tokens": 1}
    tokens = {"token_ids": np.array([1, 5], np.int32)}
    record = encode_turn(StoredTurn(**{**plain, **tokens, **fields}))
    payload = keys.trajectory_keys("maze", "g/0/0")

    text = refusal(words_of(script("append")(payload, "1:w", 0, 0, record)))

    assert text.startswith("INVALID ")
    assert message in text


def test_several_large_records_in_one_call_are_refused() -> None:
    names, large = keys.run_keys("maze"), bytes(600_000)
    payload = keys.trajectory_keys("maze", "g/0/0")
    prompts = [names.frontier, names.prompts, names.wake]
    for call, is_large in (
        (script("append")(payload, "1:w", 0, 0, large, large), True),
        (script("append")(payload, "1:w", 0, 0, large), False),
        (script("post_sealed")(names.of_post_sealed, *["g/0/0", "1:/1:w", large] * 2), True),
        (script("post_sealed")(names.of_post_sealed, "g/0/0", "1:/1:w", large), False),
        (script("add_prompts")(prompts, 1, 1, *[b"1/1:u:" + large] * 2), True),
        (script("add_prompts")(prompts, 1, 1, *[b"1/1:u:"] * 257), True),
        (script("add_prompts")(prompts, 1, 1, b"1/1:u:" + large), False),
    ):
        text = refusal(words_of(call))
        assert ("records of one call have" in text) == is_large, (call.script.name, text)


def test_turn_above_the_limit_of_a_record_is_refused() -> None:
    record, payload = bytes(MAX_RECORD_BYTES + 1), keys.trajectory_keys("maze", "g/0/0")

    text = refusal(words_of(script("append")(payload, "1", 0, 0, record)))

    assert f"turn 0 has {len(record)} bytes, more than {MAX_RECORD_BYTES}" in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": float("nan")}, "reward"),
        ({"turn_rewards": (float("inf"),)}, "turn_rewards"),
        ({"reward_components": {"style": float("nan")}}, "reward_components"),
        ({"metrics": {"length": 1e300}}, "metrics"),
        ({"tags": {"kind": "x" * 1_000}}, "tags"),
        ({"turns": (), "turn_rewards": (), "payload_crcs": ()}, "turns"),
        ({"awaits_reward": True, "reward": None}, "the lease"),
        ({"key": TrajectoryKey("g", 0, 2_000)}, "no id of a trajectory"),
    ],
)
def test_seal_with_other_values_is_refused(fields: dict[str, Any], message: str) -> None:
    seal = dataclasses.replace(sealed("g"), **fields)
    words = [seal.key.trajectory_id, "1:/100:w", encode_event(seal)]

    text = refusal(words_of(script("post_sealed")(keys.run_keys("maze").of_post_sealed, *words)))

    assert text.startswith("INVALID ")
    assert message in text


def test_no_other_argument_of_a_script_is_sent(sent: Any) -> None:
    """Each argument is replaced, but for texts for people."""
    texts = {("note_conflict", 1), ("set_paused", 1)}
    others = (b"\xff\xfe", b"a b", b"g/00/0", b"x" * 600 + b"/0/0", b"g/0/1000")
    for name in SCRIPT_ROLES:
        words = sent[name][0]
        first = 3 + int(words[2])
        for place in range(first, len(words)):
            for other in others:
                text = refusal([*words[:place], other, *words[place + 1 :]])
                is_text = (name, place - first) in texts and other != b"\xff\xfe"
                assert text.startswith("INVALID ") != is_text, (name, place - first, other, text)
        assert refusal([*words, b"x"]).startswith("INVALID "), name
