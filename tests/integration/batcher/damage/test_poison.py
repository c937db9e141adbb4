"""Fault 22, as a search: with any damage of one trajectory the batcher continues without it."""

import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fuzz.damage import PLAIN_WAYS, forged_field, forged_header
from testkit import sealed, stored_turn
from turnstream.records.encoding import EVENT, write_frame
from turnstream.records.events import encode_event
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

search = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

DAMAGED = 1
"""Sample of the group that is damaged."""

REWARDS = (1.0, 100.0, 0.0)
"""Rewards of the samples: a baseline with the damaged one would be far from the others."""

TURNS = (
    stored_turn("ab", "CDe", logprobs=-0.5, rewards=0.25, version=1),
    stored_turn("f", "G", index=1, parent=0, shared=5, logprobs=-0.25, version=2),
)
"""Turns as the SDK would store them: the second has the first in its prompt."""

RECORDS = [encode_turn(each) for each in TURNS]

ANOTHER = encode_turn(stored_turn("ab", "CDg", logprobs=-0.5, rewards=0.25, version=1))
"""A sound first turn that was not sealed."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The stored records of one trajectory."""

    turns: list[bytes]
    seal: bytes


def stored(sample: int, turns: list[bytes] = RECORDS) -> Stored:
    """Return these turns, and a seal with their checksums and the shapes of the sound turns."""
    seal = sealed(
        "g",
        sample=sample,
        reward=REWARDS[sample],
        turns=[each.shape for each in TURNS],
        turn_rewards=[0.25, 0.0],
        payload_crcs=[int.from_bytes(each[-4:], "little") for each in turns],
        has_logprobs=True,
    )
    return Stored(turns=turns, seal=encode_event(seal))


SOUND = stored(DAMAGED)


def corrupt(seed: int, place: int) -> Stored:
    """Return damage that a checksum finds, of a turn or of the seal (-1)."""
    rng = random.Random(seed)
    record = SOUND.seal if place < 0 else SOUND.turns[place]
    return with_record(place, rng.choice(PLAIN_WAYS)(record, rng))


def forged(seed: int, place: int) -> Stored:
    """Return a changed header with a checksum that fits, in the seal (-1) or in a sealed turn."""
    rng = random.Random(seed)
    way = rng.choice((forged_field, forged_header))
    if place < 0:
        return with_record(place, way(SOUND.seal, rng))
    return stored(DAMAGED, with_record(place, way(SOUND.turns[place], rng)).turns)


def with_record(place: int, record: bytes) -> Stored:
    if place < 0:
        return replace(SOUND, seal=record)
    turns = [record if index == place else turn for index, turn in enumerate(SOUND.turns)]
    return replace(SOUND, turns=turns)


def with_values(**values: Any) -> Stored:
    """Return a sealed turn with values that no model samples."""
    turn: StoredTurn = replace(TURNS[0], **values)
    return stored(DAMAGED, [encode_turn(turn), RECORDS[1]])


STRANGE = [
    *(
        with_record(-1, encode_event(event))
        for event in (
            RunClosed(reason="poison"),
            TrajectoryAbandoned(key=TrajectoryKey("g", sample=0), reason="poison"),
            GroupOpened(group_id="g", prompt_uid="", num_samples=3),
            sealed("another", sample=DAMAGED),
            sealed("g", sample=0),
            sealed("x" * 2000, sample=DAMAGED),
            sealed("g", sample=DAMAGED, turns=[], payload_crcs=[]),
        )
    ),
    with_record(-1, write_frame(EVENT, b"")),
    *(
        with_values(**{name: np.array([0.5, value, 0.5], np.float32)})
        for name in ("logprobs", "rewards")
        for value in (float("nan"), -float("inf"), 3e38)
    ),
    stored(DAMAGED, [encode_turn(stored_turn("ab", "CDEFG")), RECORDS[1]]),
    with_values(token_ids=np.array([1, 2, 3, -4, 5], np.int32)),
]
"""Inconsistent records with valid checksums."""

places = st.integers(-1, 1)
seeds = st.integers(0, 2**32)
Train = Callable[[Stored], Awaitable[tuple[str, Any]]]


@pytest.fixture
async def train(cluster: Any, caplog: pytest.LogCaptureFixture) -> Train:
    """Trains a new run of one group of three, the middle one damaged, on one batcher.

    It returns the state of the damaged trajectory, and the rows of the batch.
    """
    caplog.set_level(logging.WARNING)
    replica = await cluster.start_batcher()

    async def train_one(damage: Stored) -> tuple[str, Any]:
        run = cluster.create_run(batch_groups=1, max_planned_ahead=0)
        trainer = cluster.trainer(replica, run)
        await trainer.start()
        # The healthy ones last: with them the group is decided.
        for sample in (DAMAGED, 0, 2):
            each = damage if sample == DAMAGED else stored(sample)
            cluster.open_group(run, "g", f"g/{sample}/0", num_samples=3)
            cluster.seal(run, f"g/{sample}/0", *each.turns, seal=each.seal)
        (pulled,) = await trainer.get(1, wait_s=10)
        entry: Any = cluster.client.hget(keys.run_keys(run).ledger, f"g/{DAMAGED}/0")
        failures = [each for each in caplog.records if "failed" in each.getMessage()]
        assert not [(each.getMessage(), each.exc_info) for each in failures]
        assert cluster.states(run)[TrajectoryState.PLANNED] >= 2
        return entry.decode(), pulled.mini_batch.rows

    return train_one


def advantages_without_it(rows: Any) -> bool:
    """Whether the healthy two are compared with each other alone."""
    real = [i for i, name in enumerate(rows.trajectory_id) if name in ("g/0/0", "g/2/0")]
    by_name = {rows.trajectory_id[i]: float(rows.advantage[i]) for i in real}
    return by_name["g/0/0"] > 0 and by_name["g/0/0"] == pytest.approx(-by_name["g/2/0"])


@search
@given(damage=st.builds(corrupt, seeds, places))
@example(damage=replace(SOUND, turns=SOUND.turns[::-1]))
@example(damage=replace(SOUND, turns=[SOUND.turns[0]] * 2))
@example(damage=replace(SOUND, turns=[ANOTHER, SOUND.turns[1]]))
@example(damage=with_record(0, RECORDS[0][:3] + b"\x09" + RECORDS[0][4:]))
@example(damage=with_record(-1, SOUND.seal[:3] + b"\x09" + SOUND.seal[4:]))
async def test_corruption_found_by_a_checksum_is_rejected_and_the_rest_trains(
    train: Train, damage: Stored
) -> None:
    """Takes more than 5 s: each example is a run that is planned and served."""
    entry, rows = await train(damage)

    assert entry.startswith("dead:"), entry
    if damage.turns[0] == ANOTHER:
        assert entry == "dead:turn 0 has another checksum than was sealed"
    assert sorted(set(rows.trajectory_id)) == ["g/0/0", "g/2/0"]
    assert advantages_without_it(rows)


@search
@given(damage=st.one_of(st.sampled_from(STRANGE), st.builds(forged, seeds, places)))
@example(damage=STRANGE[0])
@example(damage=STRANGE[-2])
@example(damage=with_record(-1, write_frame(EVENT, b"")))
async def test_inconsistency_with_valid_checksums_stops_no_run(
    train: Train, damage: Stored
) -> None:
    """Takes more than 5 s: each example is a run that is planned."""
    entry, rows = await train(damage)

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
