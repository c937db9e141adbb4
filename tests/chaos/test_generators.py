"""Faults of generators and their data: lost replies, repetitions, gaps, corrupt turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from harness.proxy import Proxy
from harness.rig import Rig
from testkit import ids, sealed, shape, stored_turn
from testkit.scripts import script
from turnstream.errors import InvalidTurnError, TurnGapError
from turnstream.generator import Publisher
from turnstream.records.events import encode_event
from turnstream.records.turns import encode_turn
from turnstream.store.client import keys
from turnstream.store.client.scripts import run_command
from turnstream.types import GroupOpened, TrajectoryKey

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

    rig.join(rig.start_generator(groups=20))

    (done,) = rig.history().of("done")
    assert proxied.num_breaks == len(places)
    assert done["duplicates"] > 0
    rig.store_url = rig.server.url
    rig.start_batcher()
    rig.drain()


def test_turns_out_of_order_are_refused_and_never_sealed_with_a_gap(rig: Rig) -> None:
    # Fault 5
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


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"logprobs": [float("nan"), -1.0]}, "logprobs"),
        ({"response_ids": np.array([], np.int32)}, "response_ids"),
        ({"loss_mask": [1]}, "loss_mask"),
    ],
)
def test_invalid_turn_is_refused_by_the_publisher(
    rig: Rig, wrong: dict[str, Any], field: str
) -> None:
    # Fault 22: the store gets nothing of it, and the trajectory continues.
    with Publisher(rig.server.url, rig.run, writer="w") as publisher:
        writer = publisher.trajectory("g", 0, num_samples=1)
        right: dict[str, Any] = {"prompt_ids": ids("ab"), "response_ids": ids("CD")}
        with pytest.raises(InvalidTurnError, match=field):
            writer.append(**{**right, **wrong})
        writer.append(**right)
        writer.seal(1.0)

    assert rig.counts() == {"accepted": 1, "sealed": 1}


def _open(rig: Rig, group: str) -> int:
    names, key = keys.run_keys(rig.run), TrajectoryKey(group, sample=0)
    opened = encode_event(GroupOpened(group_id=group, prompt_uid="", num_samples=1))
    command = script("open_group")(
        names.of_open_group,
        *(group, 1, "w", opened, keys.trajectory_id(key)),
    )
    return run_command(rig.client, command)[0]
