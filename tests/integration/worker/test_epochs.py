"""Several epochs over the mini-batches of a step, on a real store and batcher."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import turnstream
from testkit import group
from turnstream.errors import InvalidConfigError, RejectedError
from turnstream.store.client.connection import connect
from turnstream.types import TrajectoryState
from turnstream.worker.steps import epoch_order
from turnstream_server.ledger.queries.ledger import read_ledger

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

GROUPS = 4


@pytest.fixture
def run(server: Any, start_batcher: Callable[[], Any]) -> Iterator[turnstream.Run]:
    """Two steps of four mini-batches, of a run that is closed."""
    start_batcher()
    with turnstream.connect(server.url) as service:
        run = service.create_run(
            "epochs", batch_groups=GROUPS, mini_batch_groups=1, max_staleness=20
        )
        with run.publisher() as publisher:
            for number in range(2 * GROUPS):
                publisher.publish(group(f"g{number}"))
        run.close()
        yield run


def taken(mini_batches: Any) -> list[tuple[int, int]]:
    return [(each.epoch, each.info.mini_batch) for each in mini_batches]


def in_epoch(epoch: int, order: Any = range(GROUPS)) -> list[tuple[int, int]]:
    return [(epoch, index) for index in order]


def test_later_epochs_yield_the_arrays_of_the_first(run: Any, server: Any) -> None:
    # A queue of one mini-batch must not stop the epochs, whose mini-batches are not queued.
    num_steps = 0
    with run.batches(max_prefetch_bytes=1) as batches:
        for step in batches:
            num_steps = step.number
            pulled = list(step.mini_batches(epochs=3))
            once = {**step.metrics, "wait_s": 0.0}
            assert taken(pulled) == [*in_epoch(0), *in_epoch(1), *in_epoch(2)]
            for index in range(GROUPS):
                first, *later = pulled[index::GROUPS]
                assert all(each.rows is first.rows for each in later)
                assert {each.content_hash for each in later} == {first.content_hash}
            step.done()
            step.commit()
            assert once["num_groups"] == once["num_rows"] / 2 == GROUPS
    assert num_steps == 2
    with connect(server.url) as client:
        counts = read_ledger(client, run.name).by_state
    assert counts[TrajectoryState.COMMITTED] == sum(counts.values()) == 2 * 2 * GROUPS


def test_step_is_done_after_its_last_epoch_alone(run: Any) -> None:
    with run.batches() as batches:
        step = next(batches)
        mini_batches = step.mini_batches(epochs=2)
        for _ in range(2 * GROUPS - 1):
            next(mini_batches)
            with pytest.raises(RejectedError, match="iterate to the end of its last epoch"):
                step.done()
        with pytest.raises(RejectedError, match="call done"):
            step.commit()
        with pytest.raises(RejectedError, match="step 1 is not done"):
            next(batches)

        assert taken(step) == [(1, GROUPS - 1)]  # a plain iteration continues the first one
        assert step.done()


def test_shuffled_epochs_have_one_order_on_all_ranks(run: Any) -> None:
    ranks = [run.batches(dp_rank=rank, dp_world_size=2, session="s") for rank in range(2)]
    expected = [
        in_epoch(0)
        + in_epoch(1, epoch_order(GROUPS, seed=5, step=step, epoch=1))
        + in_epoch(2, epoch_order(GROUPS, seed=5, step=step, epoch=2))
        for step in (1, 2)
    ]

    def train(batches: Any) -> list[list[tuple[int, int]]]:
        orders: list[list[tuple[int, int]]] = []
        for step in batches:
            orders.append(taken(step.mini_batches(epochs=3, shuffle_seed=5)))
            step.done()
        return orders

    with ThreadPoolExecutor() as pool:
        found = [*pool.map(train, ranks)]

    assert found == [expected, expected]
    assert expected[0] != expected[1]
    for batches in ranks:
        batches.close()


@pytest.mark.parametrize("epochs", [1, 3])
def test_last_epoch_releases_each_mini_batch(run: Any, epochs: int) -> None:
    with run.batches() as batches:
        step = next(batches)
        arrays: dict[int, Any] = {}
        kept: list[int] = []
        mini_batch = None
        for mini_batch in step.mini_batches(epochs=epochs):
            arrays.setdefault(mini_batch.info.mini_batch, weakref.ref(mini_batch.rows.row_id))
            kept.append(sum(array() is not None for array in arrays.values()))
        mini_batch = None

        # The loop variable holds the one before while the next one arrives.
        of_last = [1] * GROUPS if epochs == 1 else [4, 3, 2, 1]
        assert kept[-GROUPS:] == of_last
        assert kept[:-GROUPS] == [] if epochs == 1 else [1, 2, 3, 4, 4, 4, 4, 4]
        assert not any(array() is not None for array in arrays.values())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"epochs": 0}, "epochs: 0 is not a whole number from 1"),
    ({"shuffle_seed": -1}, "shuffle_seed: -1 is not a whole number from 0"),
    ({"shuffle_seed": "a"}, "shuffle_seed: 'a' is not a whole number"),
]


def test_wrong_epochs_are_refused_with_name_and_value(run: Any) -> None:
    with run.batches() as batches:
        step = next(batches)
        for arguments, message in WRONG:
            with pytest.raises(InvalidConfigError, match=message):
                step.mini_batches(**arguments)

        assert taken(step.mini_batches()) == in_epoch(0)
        with pytest.raises(RejectedError, match="step 1: an iteration over it has already started"):
            step.mini_batches(epochs=2)
