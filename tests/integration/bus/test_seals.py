"""Seals after the turns, and rewards in the events, with the entries that are skipped."""

from __future__ import annotations

import re
from typing import Any

import pytest

from testkit import sealed
from turnstream.errors import RecordError
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.types import Event, RewardPosted, SealedTrajectory, TrajectoryDied, TrajectoryKey
from turnstream_server.bus.planning.trajectories import read_posted_rewards, read_seals

pytestmark = pytest.mark.redis

KEY = TrajectoryKey("g", sample=0)


async def post(run: Any, record: Event | bytes, *, trajectory_id: str = "g/0/0") -> None:
    """An event as a generator writes it."""
    stored = record if isinstance(record, bytes) else encode_event(record)
    await run.client.xadd(run.keys.events, {"r": stored, "t": trajectory_id})


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (None, "record"),
        (b"\x00" * 16, "record"),
        (encode_event(TrajectoryDied(key=KEY, reason="checksum")), "another record.*checksum"),
        (encode_event(sealed("g", sample=1)), "another record.*sample=1"),
    ],
)
async def test_other_entries_in_place_of_a_seal_are_reported(
    run: Any, record: bytes | None, why: str
) -> None:
    whole = sealed("h")
    for name, stored in (("g/0/0", record), ("h/0/0", encode_event(whole))):
        if stored is not None:
            await run.client.xadd(keys.trajectory_keys(run.name, name).turns, {"r": stored})

    found = await read_seals(run.client, run.name, [KEY, whole.key])

    assert isinstance(found[whole.key], SealedTrajectory)
    refusal = found[KEY]
    assert isinstance(refusal, RecordError)
    assert re.search(why, str(refusal))


async def test_seals_of_more_than_one_reply_are_each_of_their_own_trajectory(run: Any) -> None:
    wanted = [TrajectoryKey("g", sample) for sample in range(300)]
    for key in wanted:
        turns = keys.trajectory_keys(run.name, key.trajectory_id).turns
        await run.client.xadd(turns, {"r": encode_event(sealed("g", sample=key.sample))})

    found = await read_seals(run.client, run.name, wanted)

    assert {key: getattr(seal, "key", None) for key, seal in found.items()} == {
        key: key for key in wanted
    }


async def test_only_the_first_posted_reward_of_each_trajectory_counts(run: Any) -> None:
    first = RewardPosted(key=KEY, reward=1.0, reward_components={})
    for _ in range(300):  # more than one reply
        await post(run, sealed("g"))
    await post(run, RewardPosted(key=KEY._replace(sample=1), reward=3.0, reward_components={}))
    await post(run, b"nobody can read it")
    await post(run, first)
    await post(run, RewardPosted(key=KEY, reward=2.0, reward_components={}))

    found = await read_posted_rewards(run.client, run.name, {KEY})

    assert found == {KEY: first}
