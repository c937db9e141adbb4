"""Faults of generators and their data: lost replies, repetitions, gaps, corrupt turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from harness.episodes import episode
from harness.proxy import Proxy
from harness.rig import Rig, config
from testkit import ids, sealed, shape, stored_turn
from testkit.scripts import script
from turnstream.errors import ConflictError, InvalidTurnError, TurnGapError
from turnstream.generator import Publisher
from turnstream.generator.api.trajectory_writers import TrajectoryWriter
from turnstream.records.events import encode_event
from turnstream.records.turns import encode_turn
from turnstream.store.client import keys
from turnstream.store.client.scripts import run_command
from turnstream.types import GroupOpened, SealedTrajectory, TrajectoryKey, TurnShape

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def proxied(rig: Rig) -> Iterator[Proxy]:
    """Stands between generators and the store."""
    with Proxy(rig.server.url) as proxy:
        rig.store_url = proxy.url
        yield proxy


def test_replies_lost_after_the_write_leave_one_copy(rig: Rig, proxied: Proxy) -> None:
    # Fault 2: connections are cut again and again behind a request that has arrived.
    places = (0, 5, 10, 15, 20, 25, 30, 35)
    proxied.cut_answers(
        script("append").sha.encode(),
        after_bytes=[each for place in places for each in (place, None, None)],
    )

    generator = rig.start_generator(groups=20)
    rig.join(generator)

    (done,) = rig.history().of("done")
    assert proxied.replies.num_cuts == len(places)
    assert done["duplicates"] > 0
    rig.store_url = rig.server.url
    rig.start_batcher()
    rig.drain()


def test_same_key_with_another_content_is_refused(rig: Rig) -> None:
    # Fault 4
    with Publisher(rig.server.url, rig.run, writer="w") as first:
        writer = first.trajectory("g", 0, num_samples=1)
        writer.append(ids("ab"), ids("CD")).result(10)
        with Publisher(rig.server.url, rig.run, writer="w") as second:
            changed = second.trajectory("g", 0, num_samples=1)
            with pytest.raises(ConflictError, match="turn 0 has another content"):
                changed.append(ids("ab"), ids("CE")).result(10)
        writer.append(ids("abCDe"), ids("F")).result(10)
        writer.seal(1.0)

    turns = keys.trajectory_keys(rig.run, "g/0/0").turns
    assert rig.client.xlen(turns) == 3  # two turns and the seal
    assert rig.counts() == {"accepted": 1, "sealed": 1}


def test_turns_out_of_order_are_refused_and_never_sealed_with_a_gap(rig: Rig) -> None:
    # Fault 5
    said = episode("g/0/0", writer="w")
    turns = [encode_turn(stored_turn("ab", "CD", index=index)) for index in range(3)]
    seal = encode_event(sealed("g", turns=[shape()] * 3))
    epoch = _open(rig, "g")
    append = script("append")
    place = keys.trajectory_keys(rig.run, "g/0/0")
    run_command(rig.client, append(place, f"{epoch}:w", 0, 0))

    for index in (2, 1):
        with pytest.raises(TurnGapError, match="expected 0"):
            run_command(rig.client, append(place, epoch, index, 0, turns[index]))
    run_command(rig.client, append(place, epoch, 0, 0, turns[0]))
    with pytest.raises(TurnGapError, match="expected 1"):
        run_command(rig.client, append(place, epoch, 2, 1, turns[2], seal))

    run_command(rig.client, append(place, epoch, 1, 1, *turns[1:], seal))
    assert rig.client.xlen(place.turns) == 4
    assert said.turns


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"logprobs": [float("nan"), -1.0]}, "logprobs"),
        ({"logprobs": [-1.0]}, "logprobs"),
        ({"logprobs": [float("-inf"), -1.0]}, "logprobs"),
        ({"response_ids": np.array([], np.int32)}, "response_ids"),
        ({"response_ids": np.array([-1, 3])}, "response_ids"),
        ({"response_ids": np.array([1 << 31, 3])}, "response_ids"),
        ({"response_ids": np.array([0.5, 1.0])}, "response_ids"),
        ({"loss_mask": [1]}, "loss_mask"),
        ({"loss_mask": [2, 1]}, "loss_mask"),
        ({"rewards": [float("nan"), 0.0]}, "rewards"),
        ({"policy_version": -1}, "policy_version"),
    ],
)
def test_invalid_turn_is_refused_by_the_publisher(
    rig: Rig, wrong: dict[str, Any], field: str
) -> None:
    # Fault 22: the store gets nothing of it, and the trajectory continues.
    with Publisher(rig.server.url, rig.run, writer="w") as publisher:
        writer = publisher.trajectory("g", 0, num_samples=1)
        right = {"prompt_ids": ids("ab"), "response_ids": ids("CD")}
        with pytest.raises(InvalidTurnError, match=field):
            _append(writer, **{**right, **wrong})
        _append(writer, **right)
        writer.seal(1.0)

    assert rig.counts() == {"accepted": 1, "sealed": 1}


def _append(writer: TrajectoryWriter, **fields: Any) -> None:
    prompt_ids, response_ids = fields.pop("prompt_ids"), fields.pop("response_ids")
    writer.append(prompt_ids, response_ids, **fields)


Poison = tuple[bytes, SealedTrajectory]


def _sound() -> Poison:
    turn = stored_turn("ab", "CD")
    return encode_turn(turn), sealed("g", turns=[turn.shape])


def _poisons() -> Iterator[Any]:
    record, _ = _sound()
    stored = stored_turn("ab", "CD").shape
    lies: dict[str, TurnShape] = {
        "no such turns": shape(1 << 30, 1 << 30),
        "other lengths": shape(2, 3),
        "a parent that is none": shape(2, 2, parent=7, shared=1),
        "more trained than sampled": shape(2, 2, trained=9),
    }
    yield pytest.param(record[:-20], stored, id="cut short")
    yield pytest.param(b"\xff\xfe" * 40, stored, id="no record")
    yield pytest.param(record[:-9] + b"\x01" + record[-8:], stored, id="damaged")
    nan = encode_turn(stored_turn("ab", "CD", logprobs=[float("nan"), -1.0]))
    yield pytest.param(nan, stored, id="NaN log-probability")
    for name, said in lies.items():
        yield pytest.param(record, said, id=name)


@pytest.mark.parametrize(("record", "said"), list(_poisons()))
def test_invalid_stored_turn_is_dead_lettered_and_never_stops_the_batcher(
    start_rig: Callable[..., Rig], record: bytes, said: TurnShape
) -> None:
    # Fault 22: a writer that leaves the SDK out. Its group of one makes way for the next.
    rig = start_rig(config=config(batch_groups=2))
    batcher = rig.start_batcher().service
    crc = int.from_bytes(record[-4:], "little")
    seal = encode_event(sealed("g", turns=[said], payload_crcs=[crc]))
    epoch = _open(rig, "g")
    names = keys.run_keys(rig.run)
    place = keys.trajectory_keys(rig.run, "g/0/0")
    run_command(
        rig.client,
        script("append")(place, f"{epoch}:w", 0, 1, record, seal),
    )
    run_command(
        rig.client,
        script("post_sealed")(names.of_post_sealed, "g/0/0", epoch, seal),
    )

    rig.start_generator(groups=6)
    rig.join(rig.start_ranks(1, max_steps=2))

    entry: Any = rig.client.hget(names.ledger, "g/0/0")
    assert entry.startswith(b"dead:"), entry
    assert batcher.status is None
    assert "planning of run chaos failed" not in batcher.log_path.read_text()


def _open(rig: Rig, group: str) -> int:
    names, key = keys.run_keys(rig.run), TrajectoryKey(group, sample=0)
    opened = encode_event(GroupOpened(group_id=group, prompt_uid="", num_samples=1))
    command = script("open_group")(
        names.of_open_group,
        *(group, 1, "w", opened, keys.trajectory_id(key)),
    )
    return run_command(rig.client, command)[0]
