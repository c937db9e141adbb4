"""Extra columns from a publisher to the tensors of a worker, on a real store and a real batcher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis

import testkit
from turnstream.batching.config import BatchingConfig
from turnstream.generator import Publisher
from turnstream.store.run.runs import create_run
from turnstream.types import DeclaredColumn
from turnstream.worker import BatchStream

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

DECLARED = (
    DeclaredColumn(name="image_grid_thw", per="items", dtype="int64", shape=(3,)),
    DeclaredColumn(name="pixel_values", per="items", dtype="float32", shape=(2,)),
    DeclaredColumn(name="positions", per="token", dtype="int64", shape=(3,)),
    DeclaredColumn(name="routes", per="first_tokens", dtype="int16", shape=(1, 2)),
    DeclaredColumn(name="teacher", per="response_token", dtype="float32", fill=-1.0),
)
FIRST = {
    "image_grid_thw": [[1, 1, 2]],
    "pixel_values": [[0.5, 0.5], [1.0, 1.0]],
    "positions": np.arange(9).reshape(3, 3),
    "routes": [[[1, 2]], [[3, 4]]],
    "teacher": [-0.25],
}
SECOND = {
    "image_grid_thw": [[1, 1, 2], [1, 1, 1]],
    "pixel_values": [[0.5, 0.5], [1.0, 1.0], [2.0, 2.0]],
    "positions": np.arange(15).reshape(5, 3),
    "routes": [[[9, 8]], [[9, 8]], [[300, 6]], [[7, 8]]],
    "teacher": [-0.75],
}
DUMMY = [[0, 1]]
ROUTES = [[[1, 2]], [[3, 4]], [[300, 6]], [[7, 8]], DUMMY]


@pytest.fixture
def run(client: redis.Redis, request: pytest.FixtureRequest) -> str:
    name = f"extras-{abs(hash(request.node.nodeid))}"
    config = BatchingConfig(batch_groups=1, mini_batch_groups=1, extra_columns=DECLARED)
    create_run(client, name, replace(config, max_staleness=100))
    return name


@pytest.fixture
def published(server: Any, run: str) -> str:
    """The run with a group of "abCdE" in two turns, and of "ab" -> "C" in one."""
    with Publisher(server.url, run) as publisher, publisher.group("g", 2) as group:
        whole = group.trajectory(0)
        whole.append(testkit.ids("ab"), testkit.ids("c"), extras=FIRST)
        whole.append(testkit.ids("abcd"), testkit.ids("e"), extras=SECOND)
        whole.seal(1.0)
        text_only = {n: FIRST[n] for n in ("positions", "routes", "teacher")}
        short = group.trajectory(1)
        short.append(testkit.ids("ab"), testkit.ids("c"), extras=text_only)
        short.seal(0.0)
    return run


def test_left_padded_extras_equal_the_published_columns(start_batcher: Any, published: str) -> None:
    with BatchStream(start_batcher().target, published) as stream:
        assert stream.config.extra_columns == DECLARED
        mini_batch = next(stream)

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
