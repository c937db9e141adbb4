"""Weights of tokens from publishers to the loss of a worker, on a real store and batcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import redis

import testkit
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.types import Aggregation, Group
from turnstream.worker import BatchStream, PulledMiniBatch
from turnstream.worker.losses import aggregate
from turnstream.worker.tensors import RowTensors

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

LENGTH_CONSTANT = 8
ROWS = [
    # (trajectory, [(weight, log-probability) of its trained tokens])
    ("A", [(0.5, -1.0), (2.0, -2.0), (0.25, -3.0)]),
    ("B", [(1.0, -0.5), (1.0, -0.25)]),
    ("B", [(0.0, -4.0)]),
]
"""The rows of `publish`. A weight of 0 counts as a trained token, a masked token does not."""


async def publish(url: str, run: str) -> None:
    """One trajectory by each publisher: one of one row, one of two."""
    letters = testkit.ids
    with Publisher(url, run) as publisher, publisher.trajectory("g", 0, num_samples=2) as one:
        one.append(
            *(letters("ab"), letters("cde")),
            logprobs=[-1.0, 0.0, -2.0],
            loss_mask=[1, 0, 1],
            token_weights=[0.5, 9.0, 2.0],
        )
        one.append(
            *(letters("abcdexy"), letters("fg")), logprobs=[-3.0, -9.0], loss_mask=[0.25, 0.0]
        )
        one.seal(reward=1.0)
    async with AsyncPublisher(url, run) as other:
        two = other.trajectory("g", 1, num_samples=2)
        await two.append(letters("ab"), letters("hi"), logprobs=[-0.5, -0.25])
        await two.append(letters("zz"), letters("k"), logprobs=[-4.0], token_weights=[0.0])
        await two.seal(reward=0.0)


def slow_mean(mode: str) -> float:
    """Return the mean of weight x -logprob over `ROWS`; counts are those of trained tokens."""
    sums = [sum(weight * -logprob for weight, logprob in tokens) for _, tokens in ROWS]
    counts = [len(tokens) for _, tokens in ROWS]
    match mode:
        case "token_mean" | "prompt_mean":  # all rows are of one group
            return sum(sums) / sum(counts)
        case "seq_mean_token_sum":
            return sum(sums) / 3
        case "constant":
            return sum(sums) / 3 / LENGTH_CONSTANT
        case "seq_mean_token_mean":
            return sum(total / count for total, count in zip(sums, counts, strict=True)) / 3
        case _:
            return (sums[0] / counts[0] + (sums[1] + sums[2]) / (counts[1] + counts[2])) / 2


def layouts(mini_batch: PulledMiniBatch) -> Iterator[RowTensors]:
    yield mini_batch.to_torch()
    yield mini_batch.to_torch_right_padded()
    (packed,) = mini_batch.to_torch_packed()
    yield packed
    yield mini_batch.to_torch_jagged()


async def test_weights_of_appended_tokens_are_those_of_the_loss(
    server: Any, client: redis.Redis, start_batcher: Any, new_run: Any
) -> None:
    run = new_run(client, batch_groups=1)
    await publish(server.url, run)

    with BatchStream(start_batcher().target, run) as stream:
        mini_batch = next(stream)

    rows, denominators = mini_batch.rows, mini_batch.denominators
    assert testkit.spell(rows) == ["abCdExyFg", "abHI", "zzK"]
    assert rows.token_weights is not None
    assert [own.tolist() for own in rows.token_weights] == [
        [0.5, 0, 2, 0, 0, 0.25, 0],
        [1, 1],
        [0],
    ]
    assert (denominators.num_tokens, denominators.num_sequences) == (6, 3)
    denominators = denominators._replace(length_constant=LENGTH_CONSTANT)
    expected = [weight for _, tokens in ROWS for weight, _ in tokens]
    for part in layouts(mini_batch):
        assert part.token_weights is not None
        assert part.token_weights[part.trained_tokens].tolist() == expected
        assert not part.token_weights[~part.trained_tokens].any()
        loss = -part.require_logprobs().double()
        assert aggregate(loss, part).item() == pytest.approx(slow_mean("token_mean"), rel=1e-6)
        for mode in get_args(Aggregation):
            mean = aggregate(loss, part, mode=mode, denominators=denominators)
            assert mean.item() == pytest.approx(slow_mean(mode), rel=1e-6), mode


async def test_weights_of_one_change_nothing(
    server: Any, client: redis.Redis, start_batcher: Any, new_run: Any
) -> None:
    bare = [testkit.turn("ab", "CdE", logprobs=-0.5), testkit.turn("xy", "Z", logprobs=-1)]
    ones = [
        testkit.turn("ab", "CdE", logprobs=-0.5, weights=1.0),
        testkit.turn("xy", "Z", logprobs=-1, weights=1.0),
    ]
    target = start_batcher().target
    rows: list[Any] = []
    for turns in (bare, ones):
        run = new_run(client, batch_groups=1)
        members = tuple(testkit.trajectory(*turns, sample=s, reward=float(s)) for s in range(2))
        with Publisher(server.url, run) as publisher:
            publisher.publish(Group(group_id="g", trajectories=members))
        with BatchStream(target, run) as stream:
            rows.append(next(stream).rows)

    assert rows[1].token_weights is None
    testkit.assert_same(rows[1], rows[0])
