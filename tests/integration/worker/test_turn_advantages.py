"""Advantages of turns from publishers to the tensors of a worker, on a real store and batcher."""

from __future__ import annotations

from typing import Any

import pytest
import redis

import testkit
from turnstream.batching.config import BatchingConfig
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.store.run.runs import create_run
from turnstream.worker import BatchStream
from turnstream_server.console.batches import read_batch

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


@pytest.fixture
def run(client: redis.Redis, request: pytest.FixtureRequest) -> str:
    name = f"turns-{abs(hash(request.node.nodeid))}"
    config = BatchingConfig(
        batch_groups=1,
        mini_batch_groups=1,
        estimator="gigpo",
        aggregation="prompt_mean",
        turn_discount=0.5,
        turn_weight=2.0,
        divide_by_std=False,
        max_staleness=100,
    )
    create_run(client, name, config)
    return name


async def publish(url: str, run: str) -> None:
    """Two trajectories: one by each publisher, two turns each, in one state at first."""
    with Publisher(url, run) as publisher, publisher.trajectory("g", 0, num_samples=2) as episode:
        episode.append(testkit.ids("ab"), testkit.ids("cd"), anchor="start", logprobs=[-0.5, -0.25])
        episode.append(testkit.ids("abcdx"), testkit.ids("e"), anchor="door")
        episode.seal(reward=1.0)
    async with AsyncPublisher(url, run) as other:
        episode_too = other.trajectory("g", 1, num_samples=2)
        await episode_too.append(testkit.ids("ab"), testkit.ids("g"), anchor=b"start")
        await episode_too.append(testkit.ids("zz"), testkit.ids("hi"), anchor=7)
        await episode_too.seal(reward=0.0)


async def test_every_turn_has_its_own_advantage_in_layouts_and_command(
    server: Any, start_batcher: Any, run: str
) -> None:
    # From "start" .5 is to come against 0: +-.25, twice, beside +-.5 for the trajectories.
    await publish(server.url, run)

    with BatchStream(start_batcher().target, run) as stream:
        mini_batch = next(stream)

    assert testkit.spell(mini_batch.rows) == ["abCDxE", "abG", "zzHI"]
    assert mini_batch.rows.advantage.tolist() == [0.5, -0.5, -0.5]
    assert mini_batch.info.aggregation == "prompt_mean"
    padded = mini_batch.to_torch()
    assert padded.advantages_BR.tolist() == [
        [1.0, 1.0, 0.0, 0.5],
        [0.0, 0.0, 0.0, -1.0],
        [0.0, 0.0, -0.5, -0.5],
    ]
    assert padded.logprobs_BR is not None
    assert padded.logprobs_BR[0, :2].tolist() == [-0.5, -0.25]
    expected = [1.0, 1.0, 0.5, -1.0, -0.5, -0.5]
    right = mini_batch.to_torch_right_padded()
    (packed,) = mini_batch.to_torch_packed()
    jagged = mini_batch.to_torch_jagged()
    assert right.advantages_BT[right.loss_mask_BT].tolist() == expected
    assert packed.advantages_N[packed.loss_mask_N].tolist() == expected
    assert jagged.advantages_M[jagged.loss_mask_M].tolist() == expected
    batch = read_batch(server.url, run, 1)
    shown = batch["mini_batches"][0]["trajectories"]
    assert [each["turn_advantages"] for each in shown] == [[1.0, 0.5], [-1.0, -0.5]]
