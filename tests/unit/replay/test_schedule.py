from __future__ import annotations

from pathlib import Path

import pytest

from turnstream.errors import InvalidConfigError
from turnstream_server.generators.config import ReplayConfig
from turnstream_server.generators.recordings import RecordedGroup
from turnstream_server.generators.replay import groups_of_shard

GROUPS = [RecordedGroup(prompt_uid=str(number), recordings=()) for number in range(5)]


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


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_the_shards_together_publish_every_group_once(num_shards: int) -> None:
    shards = [
        groups_of_shard(GROUPS, config(shard=shard, num_shards=num_shards))
        for shard in range(num_shards)
    ]

    assert sorted(g.prompt_uid for shard in shards for g in shard) == ["0", "1", "2", "3", "4"]


def test_a_limit_counts_groups_of_the_file_and_not_of_the_shard() -> None:
    taken = groups_of_shard(GROUPS, config(shard=1, num_shards=2, max_groups=3))

    assert [g.prompt_uid for g in taken] == ["1"]


def test_a_shard_beyond_the_last_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="shard: 2 is not below 2"):
        config(shard=2, num_shards=2)
