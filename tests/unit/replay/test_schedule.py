from __future__ import annotations

from pathlib import Path

import pytest

from turnstream.errors import InvalidConfigError
from turnstream_server.generators.config import ReplayConfig
from turnstream_server.generators.recordings import Message, RecordedGroup, Recording
from turnstream_server.generators.replay import groups_of_shard, schedule


def recording(num_turns: int, *, sample: int = 0, times: tuple[float, ...] = ()) -> Recording:
    """A user message before every reply."""
    messages = [Message(role="user", content="?"), Message(role="assistant", content="!")]
    return Recording(
        prompt_uid="a",
        sample=sample,
        reward=0.0,
        messages=messages * num_turns,
        turns=[*range(1, 2 * num_turns, 2)],
        times=[*times],
    )


def group(*recordings: Recording, prompt_uid: str = "a") -> RecordedGroup:
    return RecordedGroup(prompt_uid=prompt_uid, recordings=recordings)


def config(*, shard: int = 0, num_shards: int = 1, max_groups: int = 0) -> ReplayConfig:
    return ReplayConfig(
        redis_url="redis://nowhere",
        run="run",
        writer="replay",
        recordings=Path("a.jsonl"),
        tokenizer=Path("tokenizer"),
        shard=shard,
        num_shards=num_shards,
        max_groups=max_groups,
    )


def test_trajectories_of_a_group_take_turns() -> None:
    order = [(turn.sample, turn.turn) for turn in schedule(group(recording(3), recording(2)))]

    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]


def test_recorded_times_decide_the_order_each_trajectory_from_its_own_start() -> None:
    late = recording(2, times=(100.0, 101.0, 102.0, 103.0))
    slow = recording(2, times=(0.0, 2.0, 2.5, 9.0))

    order = [(turn.due_s, turn.sample, turn.turn) for turn in schedule(group(late, slow))]

    assert order == [(1.0, 0, 0), (2.0, 1, 0), (3.0, 0, 1), (9.0, 1, 1)]


def test_one_trajectory_without_times_leaves_the_clock_of_the_group_unused() -> None:
    timed = recording(1, times=(0.0, 5.0))

    assert {turn.due_s for turn in schedule(group(timed, recording(1)))} == {0.0}


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_the_shards_together_publish_every_group_once(num_shards: int) -> None:
    groups = [group(recording(1), prompt_uid=str(number)) for number in range(5)]

    shards = [
        groups_of_shard(groups, config(shard=shard, num_shards=num_shards))
        for shard in range(num_shards)
    ]

    assert sorted(g.prompt_uid for shard in shards for g in shard) == ["0", "1", "2", "3", "4"]


def test_a_limit_counts_groups_of_the_file_and_not_of_the_shard() -> None:
    groups = [group(recording(1), prompt_uid=str(number)) for number in range(5)]

    taken = groups_of_shard(groups, config(shard=1, num_shards=2, max_groups=3))

    assert [g.prompt_uid for g in taken] == ["1"]


def test_a_shard_beyond_the_last_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="shard: 2 is not below 2"):
        config(shard=2, num_shards=2)
