"""Fault 22, as a search: with any damage of one trajectory the batcher continues without it."""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from testkit import sealed, stored_turn
from turnstream.records.events import encode_event
from turnstream.records.framing import EVENT, TURN, write_frame
from turnstream.records.turns import encode_turn
from turnstream.store.client import keys
from turnstream.types import (
    GroupOpened,
    RunClosed,
    StoredTurn,
    TrajectoryAbandoned,
    TrajectoryKey,
    TrajectoryState,
)
from turnstream.wire.v1 import records_pb2 as wire

pytestmark = [pytest.mark.redis, pytest.mark.grpc, pytest.mark.timeout(300)]

search = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])

POISONED = 1
"""Sample of the group that is poisoned."""

REWARDS = (1.0, 100.0, 0.0)
"""Of the samples: a baseline with the poisoned one in it would be far from the others'."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The stored records of one trajectory.

    Attributes:
        turns: records, before the seal.
        seal: as it is stored and posted.
    """

    turns: tuple[bytes, ...]
    seal: bytes


def sound(group_id: str, sample: int) -> Stored:
    """Two turns, the second with the first in its prompt, as the SDK would send them."""
    turns = [
        stored_turn("ab", "CDe", logprobs=-0.5, rewards=0.25, version=1),
        stored_turn("f", "G", index=1, parent=0, shared=5, logprobs=-0.25, version=2),
    ]
    records = tuple(encode_turn(each) for each in turns)
    return Stored(turns=records, seal=seal_of(group_id, sample, turns, records))


def seal_of(
    group_id: str, sample: int, turns: list[StoredTurn], records: tuple[bytes, ...], **said: Any
) -> bytes:
    """The seal of these turns; `said` replaces what is true."""
    event = sealed(
        group_id,
        sample=sample,
        reward=REWARDS[sample],
        turns=[each.shape for each in turns],
        turn_rewards=[0.25, 0.0],
        payload_crcs=[int.from_bytes(each[-4:], "little") for each in records],
        has_logprobs=True,
    )
    return encode_event(replace(event, **said))


def with_crc(record: bytes) -> bytes:
    """The record with a checksum that fits it."""
    return record[:-4] + struct.pack("<I", zlib.crc32(record[:-4]))


Poison = Callable[[str, Stored], Stored]
"""Spoils what is stored of the poisoned sample of a group."""


def _changed(record: bytes, position: int, bits: int) -> bytes:
    damaged = bytearray(record)
    damaged[position % len(record)] ^= bits
    return bytes(damaged)


@st.composite
def byte_changes(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Damage by a disk or a careless writer that a checksum finds."""
    kind = draw(st.sampled_from(["change", "cut", "add", "zeros", "other"]))
    position = draw(st.integers(0, 400))
    bits = draw(st.integers(1, 255))
    junk = draw(st.binary(min_size=1, max_size=40))
    match kind:
        case "change":
            return lambda record: _changed(record, position, bits)
        case "cut":
            return lambda record: record[: position % len(record)]
        case "add":
            return lambda record: record + junk
        case "zeros":
            return lambda record: bytes(len(record))
        case _:
            return lambda record: junk


def in_turn(index: int, change: Callable[[bytes], bytes]) -> Poison:
    """The change in one of the turns."""

    def spoil(_: str, stored: Stored) -> Stored:
        turns = list(stored.turns)
        turns[index] = change(turns[index])
        return replace(stored, turns=tuple(turns))

    return spoil


def in_seal(change: Callable[[bytes], bytes]) -> Poison:
    """The change in the seal."""
    return lambda _, stored: replace(stored, seal=change(stored.seal))


def swapped(_: str, stored: Stored) -> Stored:
    """The turns in the wrong order."""
    return replace(stored, turns=stored.turns[::-1])


def unsealed_turn(_: str, stored: Stored) -> Stored:
    """A turn more than was sealed, in the place of one that was."""
    return replace(stored, turns=(stored.turns[0], stored.turns[0]))


visible_poison = st.one_of(
    st.builds(in_turn, st.integers(0, 1), byte_changes()),
    st.builds(in_seal, byte_changes()),
    st.sampled_from([swapped, unsealed_turn]),
)


@st.composite
def lies(draw: st.DrawFn) -> Poison:
    """Inconsistent records with valid checksums."""
    kind = draw(st.sampled_from(["header", "body", "seal", "arrays", "values", "event"]))
    position, bits = draw(st.integers(0, 400)), draw(st.integers(1, 255))
    match kind:
        case "seal":
            return in_seal(lambda record: _another_seal(record, position, bits))
        case "event":
            return in_seal(lambda _: encode_event(draw(st.sampled_from(STRANGE_EVENTS))))
        case "arrays":
            header = draw(turn_headers())
            body = np.frombuffer(draw(st.binary(max_size=64)), np.uint8)
            record = write_frame(TURN, header.SerializeToString(), [body])
        case "values":
            record = encode_turn(draw(strange_turns()))
        case _:
            place = 8 + position if kind == "header" else -1 - position
            base = sound("g", POISONED).turns[0]
            record = with_crc(_changed(base[:-4], place, bits) + b"0000")
    return lambda group_id, stored: _resealed(group_id, stored, record)


def _another_seal(record: bytes, position: int, bits: int) -> bytes:
    """The record with another byte, but for its version: a newer one stops the run."""
    position %= len(record) - 4
    return with_crc(_changed(record[:-4], position + (position == 3), bits) + b"0000")


STRANGE_EVENTS = [
    RunClosed(reason="poison"),
    TrajectoryAbandoned(key=TrajectoryKey("g", sample=0), reason="poison"),
    GroupOpened(group_id="g", prompt_uid="", num_samples=3),
    sealed("another", sample=POISONED),
    sealed("g", sample=0),
    sealed("x" * 2000, sample=POISONED),
    sealed("g", sample=POISONED, turns=[], payload_crcs=[]),
]


@st.composite
def turn_headers(draw: st.DrawFn) -> wire.TurnHeader:
    """Headers that say anything."""
    number = st.one_of(st.integers(0, 8), st.sampled_from([2**31 - 1, 2**32 - 1]))
    dtype = st.sampled_from(["int32", "float32", "uint8", "int64", "object", "2f4", ""])
    names = st.sampled_from(["token_ids", "logprobs", "rewards", "loss_mask", "extra.x", "new"])
    arrays = [
        wire.ArraySpec(
            name=draw(names),
            dtype=draw(dtype),
            shape=draw(st.lists(number, max_size=3)),
            num_shared=draw(number),
        )
        for _ in range(draw(st.integers(0, 4)))
    ]
    return wire.TurnHeader(
        index=draw(number),
        parent_turn=draw(st.integers(-3, 3)),
        shared_tokens=draw(number),
        num_response_tokens=draw(number),
        arrays=arrays,
        version_runs=[
            wire.VersionRun(version=draw(st.integers(-1, 3)), count=draw(number))
            for _ in range(draw(st.integers(0, 2)))
        ],
    )


@st.composite
def strange_turns(draw: st.DrawFn) -> StoredTurn:
    """Turns of the right form whose numbers are none that a model samples."""
    strange = st.sampled_from([float("nan"), float("inf"), -float("inf"), 3e38])
    turn = stored_turn("ab", "CDe", logprobs=-0.5, rewards=0.25, version=1)
    match draw(st.sampled_from(["logprobs", "rewards", "token_ids"])):
        case "token_ids":
            ids = turn.token_ids.copy()
            ids[draw(st.integers(0, 4))] = draw(st.integers(-(2**31), -1))
            return replace(turn, token_ids=ids)
        case name:
            values = np.full(3, 0.5, np.float32)
            values[draw(st.integers(0, 2))] = draw(strange)
            return replace(turn, **{name: values})


def _resealed(group_id: str, stored: Stored, record: bytes) -> Stored:
    """The first turn replaced by this one, and a seal that carries its checksum."""
    turns = [stored_turn("ab", "CDe"), stored_turn("f", "G", index=1, parent=0, shared=5)]
    records = (record, stored.turns[1])
    return Stored(turns=records, seal=seal_of(group_id, POISONED, turns, records))


class Kitchen:
    """One run after another on one batcher; a run is one group of three, the middle one spoilt."""

    def __init__(self, house: Any, replica: Any, caplog: pytest.LogCaptureFixture) -> None:
        self._house = house
        self._replica = replica
        self._caplog = caplog

    async def train_beside(self, poison: Poison) -> tuple[str, Any]:
        """Return the state of the damaged trajectory, and the rows of the batch."""
        run = self._house.create_run(batch_groups=1, max_planned_ahead=0)
        trainer = self._house.trainer(self._replica, run)
        await trainer.start()
        # The healthy ones last: with them the group is decided.
        for sample in (POISONED, 0, 2):
            stored = sound("g", sample)
            stored = poison("g", stored) if sample == POISONED else stored
            self._house.open_group(run, "g", f"g/{sample}/0", num_samples=3)
            self._house.seal(run, f"g/{sample}/0", *stored.turns, seal=stored.seal, posts=True)
        (pulled,) = await trainer.get(1, wait_s=10)
        entry: Any = self._house.client.hget(keys.run_keys(run).ledger, f"g/{POISONED}/0")
        states = self._house.states(run)
        failures = [each for each in self._caplog.records if "failed" in each.getMessage()]
        assert not [(each.getMessage(), each.exc_info) for each in failures]
        assert states[TrajectoryState.PLANNED] >= 2
        return entry.decode(), pulled.mini_batch.rows


@pytest.fixture
async def kitchen(house: Any, caplog: pytest.LogCaptureFixture) -> Kitchen:
    caplog.set_level(logging.WARNING)
    return Kitchen(house, await house.start_batcher(), caplog)


def advantages_without_it(rows: Any) -> bool:
    """Whether the healthy two are compared with each other alone."""
    real = [i for i, name in enumerate(rows.trajectory_id) if name in ("g/0/0", "g/2/0")]
    by_name = {rows.trajectory_id[i]: float(rows.advantage[i]) for i in real}
    return by_name["g/0/0"] > 0 and by_name["g/0/0"] == pytest.approx(-by_name["g/2/0"])


@search
@given(poison=visible_poison)
@example(poison=in_turn(0, lambda record: record[:3] + b"\x09" + record[4:]))
@example(poison=in_seal(lambda record: record[:3] + b"\x09" + record[4:]))
async def test_corruption_found_by_a_checksum_is_rejected_and_the_rest_trains(
    kitchen: Kitchen, poison: Poison
) -> None:
    entry, rows = await kitchen.train_beside(poison)

    assert entry.startswith("dead:"), entry
    assert sorted(set(rows.trajectory_id)) == ["g/0/0", "g/2/0"]
    assert advantages_without_it(rows)


@search
@given(poison=lies())
@example(poison=in_seal(lambda _: write_frame(EVENT, b"")))
@example(poison=in_seal(lambda _: encode_event(RunClosed(reason="poison"))))
async def test_inconsistency_with_valid_checksums_stops_no_run(
    kitchen: Kitchen, poison: Poison
) -> None:
    entry, rows = await kitchen.train_beside(poison)

    state = entry.partition(":")[0]
    assert state in ("dead", "incomplete", "planned"), entry
    assert ("g/1/0" in rows.trajectory_id) == (state == "planned")
    assert {"g/0/0", "g/2/0"} <= set(rows.trajectory_id)
    if state == "planned":  # a change that makes another sound trajectory
        assert np.isfinite(rows.logprobs.values).all()
        assert np.isfinite(rows.rewards.values).all()
        assert rows.input_ids.values.min() >= 0
    else:
        assert advantages_without_it(rows)
