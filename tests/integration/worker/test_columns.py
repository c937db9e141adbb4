"""Columns of appended turns, from publishers to a worker's tensors, on a real store and batcher."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import redis

import testkit
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.types import DeclaredColumn
from turnstream.worker import BatchStream, PulledMiniBatch
from turnstream.worker.losses import aggregate
from turnstream.worker.tensors import RowTensors
from turnstream_server.console.batches import read_batch

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

Turns = Sequence[tuple[str, str, dict[str, Any]]]
"""Prompt, response and other columns of each turn."""


@pytest.fixture
def trained(
    server: Any, client: redis.Redis, start_batcher: Any, new_run: Any
) -> Callable[..., Awaitable[tuple[str, PulledMiniBatch]]]:
    """`trained(first, second, rewards, **config)` publishes a group; it returns run and batch.

    Each of the two trajectories has a kind of publisher of its own.
    """

    async def publish(
        first: Turns, second: Turns, rewards: Sequence[float | None] = (1.0, 0.0), **fields: Any
    ) -> tuple[str, PulledMiniBatch]:
        run = new_run(client, batch_groups=1, **fields)
        with Publisher(server.url, run) as other, other.trajectory("g", 0, num_samples=2) as one:
            for prompt, response, columns in first:
                one.append(testkit.ids(prompt), testkit.ids(response), **columns)
            one.seal(rewards[0])
        async with AsyncPublisher(server.url, run) as publisher:
            two = publisher.trajectory("g", 1, num_samples=2)
            for prompt, response, columns in second:
                await two.append(testkit.ids(prompt), testkit.ids(response), **columns)
            await two.seal(rewards[1])
        with BatchStream(start_batcher().target, run) as stream:
            return run, next(stream)

    return publish


def layouts(mini_batch: PulledMiniBatch) -> list[RowTensors]:
    return [
        mini_batch.to_torch(),
        mini_batch.to_torch_right_padded(),
        *mini_batch.to_torch_packed(),
        mini_batch.to_torch_jagged(),
    ]


WEIGHTED: tuple[Turns, Turns] = (
    [
        (
            *("ab", "cde"),
            {
                "logprobs": [-1.0, 0.0, -2.0],
                "loss_mask": [1, 0, 1],
                "token_weights": [0.5, 9.0, 2.0],
            },
        ),
        ("abcdexy", "fg", {"logprobs": [-3.0, -9.0], "loss_mask": [0.25, 0.0]}),
    ],
    [
        ("ab", "hi", {"logprobs": [-0.5, -0.25]}),
        ("zz", "k", {"logprobs": [-4.0], "token_weights": [0.0]}),
    ],
)
"""A trajectory of one row, and one of two."""

WEIGHTED_ROWS = [
    # [(weight, log-probability) of the trained tokens of a row]
    [(0.5, -1.0), (2.0, -2.0), (0.25, -3.0)],
    [(1.0, -0.5), (1.0, -0.25)],
    [(0.0, -4.0)],
]
"""The rows of WEIGHTED. A weight of 0 counts as a trained token, a masked token does not."""


async def test_weights_of_appended_tokens_are_those_of_the_loss(trained: Any) -> None:
    _, mini_batch = await trained(*WEIGHTED)

    rows, denominators = mini_batch.rows, mini_batch.denominators
    assert testkit.spell(rows) == ["abCdExyFg", "abHI", "zzK"]
    assert rows.token_weights is not None
    assert [own.tolist() for own in rows.token_weights] == [
        *([0.5, 0, 2, 0, 0, 0.25, 0], [1, 1], [0])
    ]
    assert (denominators.num_tokens, denominators.num_sequences) == (6, 3)
    tokens = [token for row in WEIGHTED_ROWS for token in row]
    expected = [weight for weight, _ in tokens]
    mean = sum(weight * -logprob for weight, logprob in tokens) / len(tokens)
    for part in layouts(mini_batch):
        assert part.token_weights is not None
        assert part.token_weights[part.trained_tokens].tolist() == expected
        assert not part.token_weights[~part.trained_tokens].any()
        loss = -part.require_logprobs().double()
        assert aggregate(loss, part).item() == pytest.approx(mean, rel=1e-6)


async def test_every_turn_has_its_own_advantage_in_layouts_and_command(
    trained: Any, server: Any
) -> None:
    # From "start" .5 is to come against 0: +-.25, twice, beside +-.5 for the trajectories.
    turns: tuple[Turns, Turns] = (
        [
            ("ab", "cd", {"anchor": "start", "logprobs": [-0.5, -0.25]}),
            ("abcdx", "e", {"anchor": "door"}),
        ],
        [("ab", "g", {"anchor": b"start"}), ("zz", "hi", {"anchor": 7})],
    )
    gigpo = {"estimator": "gigpo", "aggregation": "prompt_mean", "divide_by_std": False}

    run, mini_batch = await trained(*turns, turn_discount=0.5, turn_weight=2.0, **gigpo)

    assert testkit.spell(mini_batch.rows) == ["abCDxE", "abG", "zzHI"]
    assert mini_batch.rows.advantage.tolist() == [0.5, -0.5, -0.5]
    assert mini_batch.info.aggregation == "prompt_mean"
    padded, *others = layouts(mini_batch)
    assert padded.advantages.tolist() == [[1, 1, 0, 0.5], [0, 0, 0, -1], [0, 0, -0.5, -0.5]]
    assert padded.logprobs is not None
    assert padded.logprobs[0, :2].tolist() == [-0.5, -0.25]
    for part in others:
        assert part.advantages[part.trained_tokens].tolist() == [1.0, 1.0, 0.5, -1.0, -0.5, -0.5]
    shown = read_batch(server.url, run, 1)["mini_batches"][0]["trajectories"]
    assert [each["turn_advantages"] for each in shown] == [[1.0, 0.5], [-1.0, -0.5]]


@pytest.mark.parametrize(
    ("source", "expected"), [("sum_of_turns", [0.25, 1.5]), ("last_turn", [-0.25, 0.5])]
)
async def test_rewards_of_turns_are_those_of_the_trajectory(
    trained: Any, source: str, expected: list[float]
) -> None:
    rewards = [[0.5, -0.25], [1.0, 0.5]]
    turns = [
        [("ab", "cd", {"reward": first}), ("abcde", "fg", {"reward": second})]
        for first, second in rewards
    ]

    _, mini_batch = await trained(
        *turns, rewards=(None, None), reward_source=source, estimator="dr_grpo"
    )

    rows, mean = mini_batch.rows, sum(expected) / 2
    assert rows.reward.tolist() == expected
    assert rows.advantage.tolist() == [reward - mean for reward in expected]
    assert [own.tolist() for own in rows.rewards] == [
        [0, first, 0, 0, second] for first, second in rewards
    ]


DECLARED = (
    DeclaredColumn(name="image_grid_thw", per="items", dtype="int64", shape=(3,)),
    DeclaredColumn(name="pixel_values", per="items", dtype="float32", shape=(2,)),
    DeclaredColumn(name="positions", per="token", dtype="int64", shape=(3,)),
    DeclaredColumn(name="routes", per="first_tokens", dtype="int16", shape=(1, 2)),
    DeclaredColumn(name="teacher", per="response_token", dtype="float32", fill=-1.0),
)
TEXT_ONLY = {
    "positions": np.arange(9).reshape(3, 3),
    "routes": [[[1, 2]], [[3, 4]]],
    "teacher": [-0.25],
}
FIRST = {**TEXT_ONLY, "image_grid_thw": [[1, 1, 2]], "pixel_values": [[0.5, 0.5], [1.0, 1.0]]}
SECOND = {
    "image_grid_thw": [[1, 1, 2], [1, 1, 1]],
    "pixel_values": [[0.5, 0.5], [1.0, 1.0], [2.0, 2.0]],
    "positions": np.arange(15).reshape(5, 3),
    "routes": [[[9, 8]], [[9, 8]], [[300, 6]], [[7, 8]]],
    "teacher": [-0.75],
}
DUMMY = [[0, 1]]
ROUTES = [[[1, 2]], [[3, 4]], [[300, 6]], [[7, 8]], DUMMY]


async def test_left_padded_extras_equal_the_published_columns(trained: Any) -> None:
    whole = [("ab", "c", {"extras": FIRST}), ("abcd", "e", {"extras": SECOND})]

    _, mini_batch = await trained(
        whole, [("ab", "c", {"extras": TEXT_ONLY})], extra_columns=DECLARED
    )

    assert testkit.spell(mini_batch.rows) == ["abCdE", "abC"]
    extras = mini_batch.to_torch().extras
    assert list(extras) == [column.name for column in DECLARED]
    assert extras["positions"].values.tolist() == [
        np.arange(15).reshape(5, 3).tolist(),
        [[0] * 3, [0] * 3, *np.arange(9).reshape(3, 3).tolist()],
    ]
    assert extras["routes"].values.tolist() == [ROUTES, [DUMMY] * 2 + ROUTES[:2] + [DUMMY]]
    assert extras["routes"].is_missing is not None
    assert extras["routes"].is_missing.tolist() == [
        [False, False, False, False, True],
        [True, True, False, False, True],
    ]
    assert extras["teacher"].values.tolist() == [[-0.25, -1.0, -0.75], [0.0, 0.0, -0.25]]
    assert extras["pixel_values"].values.tolist() == SECOND["pixel_values"]
    assert extras["image_grid_thw"].values.tolist() == SECOND["image_grid_thw"]
    assert extras["pixel_values"].num_items == (3, 0)
