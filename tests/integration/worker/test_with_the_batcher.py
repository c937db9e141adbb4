"""The stream against the batcher itself, with turns that a publisher sent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis

import testkit
from turnstream.generator import Publisher
from turnstream.store.run.runs import create_run
from turnstream.worker import BatchStream, PulledMiniBatch

pytestmark = [pytest.mark.grpc, pytest.mark.redis]

"""Far above what a wait takes that is woken, on a machine that is busy, and below what it would."""

_numbers = itertools.count(1)

GROUP_TEXTS = [("ab", "CD"), ("ab", "EFG")]


@pytest.fixture
def run(client: redis.Redis) -> str:
    """A run with two groups in a batch, each an optimizer update of its own."""
    name = f"worker-{next(_numbers)}"
    config = testkit.config(batch_groups=2, mini_batch_groups=1)
    create_run(client, name, replace(config, max_staleness=100))
    return name


@pytest.fixture
def publish(server: Any, run: str) -> Iterator[Callable[..., None]]:
    """`publish(num_groups, closes=...)` sends groups of two trajectories "abCD" and "abEFG"."""
    with Publisher(server.url, run, writer="w") as publisher:
        numbers = iter(range(100))

        def send(num_groups: int, *, closes: bool = False) -> None:
            for _ in range(num_groups):
                trajectories = [
                    testkit.trajectory(
                        testkit.turn(*text, logprobs=-0.5), sample=n, reward=float(n)
                    )
                    for n, text in enumerate(GROUP_TEXTS)
                ]
                group = testkit.group(f"g{next(numbers)}", *trajectories)
                publisher.publish(group).result(10)
            if closes:
                publisher.close_run()

        yield send


def train(stream: BatchStream) -> list[tuple[int, int, list[str], list[str]]]:
    """(step, mini-batch, group of every row, rows) of everything there is, acknowledged."""
    seen = []
    for mini_batch in stream:
        rows = mini_batch.rows
        texts = testkit.spell(rows)
        seen.append((mini_batch.info.step, mini_batch.info.mini_batch, [*rows.group_id], texts))
        if mini_batch.is_last:
            stream.committed(stream.stepped())
    return seen


def pull(stream: BatchStream) -> list[PulledMiniBatch]:
    """The mini-batches of one batch."""
    pulled = [next(stream)]
    while not pulled[-1].is_last:
        pulled.append(next(stream))
    return pulled


def hashes(pulled: list[PulledMiniBatch]) -> list[str]:
    return [mini_batch.content_hash for mini_batch in pulled]


def test_published_groups_are_trained_once_in_order(
    start_batcher: Any, run: str, publish: Any
) -> None:
    publish(3, closes=True)

    with BatchStream(start_batcher().target, run) as stream:
        seen = train(stream)
        assert stream.config.batch_groups == 2

    rows = ["abCD", "abEFG"]
    assert [entry[2:] for entry in seen] == [([g, g], rows) for g in ("g0", "g1", "g2")]
    assert [entry[0] for entry in seen] in ([1, 1, 2], [1, 2, 2])


def test_tensors_hold_the_published_turns(start_batcher: Any, run: str, publish: Any) -> None:
    publish(2)

    with BatchStream(start_batcher().target, run) as stream:
        part = next(stream).to_torch()

    assert part.input_ids_BT.tolist() == [
        [0, *testkit.ids("abcd").tolist()],
        testkit.ids("abefg").tolist(),
    ]
    assert part.loss_mask_BR.tolist() == [[False, True, True], [True, True, True]]
    assert part.require_logprobs().tolist() == [[0.0, -0.5, -0.5], [-0.5, -0.5, -0.5]]
    assert part.advantages_BR[0].tolist() == [0.0, *[pytest.approx(-0.7071, abs=1e-4)] * 2]


def test_ranks_share_the_rows_of_a_mini_batch(start_batcher: Any, run: str, publish: Any) -> None:
    publish(2)
    target = start_batcher().target
    options: Any = {"dp_world_size": 2, "session": "s"}

    with (
        BatchStream(target, run, 0, **options) as rank_0,
        BatchStream(target, run, 1, **options) as rank_1,
    ):
        shares = [next(rank_0), next(rank_1)]

    assert sorted(text for share in shares for text in testkit.spell(share.rows)) == [
        "abCD",
        "abEFG",
    ]
    assert shares[0].info.denominators == shares[1].info.denominators


def test_uncommitted_step_comes_back_after_a_restart(
    start_batcher: Any, run: str, publish: Any
) -> None:
    publish(6)
    target = start_batcher().target
    with BatchStream(target, run) as stream:
        pull(stream)
        kept = stream.stepped()
        stream.committed(kept)
        lost = hashes(pull(stream))
        stream.stepped()

    with BatchStream(target, run, recovery_token=kept) as stream:
        again = pull(stream)

    assert hashes(again) == lost
    assert again[0].info.step == 2


def test_stream_continues_after_a_batcher_restart(
    start_batcher: Any, run: str, publish: Any
) -> None:
    batcher = start_batcher()
    publish(4)

    with BatchStream(batcher.target, run, max_prefetch_bytes=1) as stream:
        first = [next(stream)]
        batcher.stop()
        batcher.start()
        first += [next(stream)]
        stream.stepped()
        second = pull(stream)

    assert [m.info.mini_batch for m in first + second] == [0, 1, 0, 1]
