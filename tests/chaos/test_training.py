"""Faults of trainers: killed ranks, both acknowledgements, rollbacks, other world sizes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from harness.history import History
from harness.proxy import Proxy
from harness.rig import PATIENCE_S, Rig
from turnstream.worker.observer import ObserverStream
from turnstream_server.ledger.core.frontier import read_frontier

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]

NUM_STEPS = 6


@pytest.fixture
def fed(rig: Rig) -> Rig:
    rig.start_batcher()
    rig.start_generator(groups=4 * NUM_STEPS)
    return rig


@pytest.fixture
def proxy(fed: Rig) -> Iterator[Proxy]:
    with Proxy(fed.address()) as proxy:
        yield proxy


def test_rank_killed_within_a_transfer_gets_the_same_bytes_again(rig: Rig) -> None:
    # Fault 15: during the stream. It has half of the second mini-batch, of some megabytes.
    rig.start_batcher()
    rig.start_generator(groups=4, more_tokens=100_000)
    with ObserverStream(rig.address(), rig.run, "beside", 1, 2, first_step=1) as beside:
        sizes = [next(beside).num_bytes, next(beside).num_bytes]
    with Proxy(rig.address()) as proxy:
        proxy.break_replies([sizes[0] + sizes[1] // 2], is_stop=True)
        targets = [rig.address(), proxy.address]
        whole, reading = rig.start_ranks(2, targets=targets, barrier_s=0.5)
        rig.wait(lambda: proxy.num_breaks, "half of a mini-batch")
        rig.wait_for_lines("received", 2 + 1)

        reading.kill()
        whole.wait(PATIENCE_S)

    assert min(sizes) > 1_000_000
    assert whole.status == 3  # a typed error, by its deadline
    (refused,) = rig.history().of("refused")
    assert "PeerLostError" in refused["error"]
    assert read_frontier(rig.client, rig.run).stepped == 0
    before = _contents_of_step_1(rig)
    assert sorted(before) == [(0, 0), (0, 1), (1, 0)]  # the half one was not received
    rig.drain(2)
    after = _contents_of_step_1(rig)
    assert {len(hashes) for hashes in after.values()} == {1}
    assert len(after) == 4


def _contents_of_step_1(rig: Rig) -> dict[tuple[int, int], set[str]]:
    found: dict[tuple[int, int], set[str]] = {}
    for line in rig.history().of("received"):
        if line["step"] == 1:
            found.setdefault((line["dp_rank"], line["mini_batch"]), set()).add(line["content"])
    return found


def test_transfer_cut_in_its_middle_is_never_half_accepted(fed: Rig, proxy: Proxy) -> None:
    # Fault 15: during the stream, in a header, a frame and between frames.
    # The first two transfers begin with the session's start, of some 1,400 bytes; each mini-batch
    # has some 4,700.
    places = (700, 1470, 120, 230, 2500, 5100, 7500, 12000)
    proxy.break_replies(places)

    fed.join(fed.start_ranks(1, target=proxy.address, max_steps=NUM_STEPS))

    assert proxy.num_breaks == len(places)
    fed.drain()


@pytest.mark.parametrize(
    "failpoint",
    [
        "train.after_update",  # Fault 16: after the optimizer step, before its acknowledgement
        "train.after_stepped",  # Fault 17: after it, before the checkpoint
        "checkpoint.after_weights",  # Fault 18: weights written, token not
        "checkpoint.before_committed",  # Fault 18: checkpoint on disk, no batcher knows
        "checkpoint.after_committed",
    ],
)
def test_trainer_killed_between_its_acknowledgements_trains_nothing_twice(
    fed: Rig, failpoint: str
) -> None:
    # Faults 16, 17 and 18; with checkpoints every second step, so that two steps come back.
    count = 1 if failpoint.startswith("checkpoint") else 4
    ranks = fed.start_ranks(1, failpoint=f"{failpoint}@{count}", checkpoint_every=2)
    ranks[0].wait(PATIENCE_S)
    assert ranks[0].status == -signal.SIGKILL

    fed.drain()

    first, second = fed.history().sessions
    trained = 4 if count == 4 else 2
    assert first.updated == tuple(range(1, trained + 1))
    kept = 2 if count == 4 or failpoint != "checkpoint.after_weights" else 0
    assert second.updated == tuple(range(kept + 1, NUM_STEPS + 1))


@pytest.mark.parametrize("from_step", [0, 2])
def test_trainer_that_rolls_back_gets_every_later_step(fed: Rig, from_step: int) -> None:
    # Fault 19
    fed.join(fed.start_ranks(1, checkpoint_every=2, max_steps=4))
    assert fed.counts()["committed"] == 4 * 4 * 2

    fed.join(fed.start_ranks(1, from_step=from_step, max_steps=from_step + 1))

    assert fed.counts().get("committed", 0) == from_step * 4 * 2
    assert fed.history().sessions[1].updated == (from_step + 1,)
    fed.drain(from_step=from_step)
    assert fed.history().sessions[2].updated == tuple(range(from_step + 1, NUM_STEPS + 1))


def test_world_size_changes_from_four_to_three_to_four(fed: Rig) -> None:
    """Takes more than 5 s: eleven ranks start."""
    # Fault 20: each change throws away a step that was stepped, which comes again in the new cut.
    for world_size in (4, 3):
        ranks = fed.start_ranks(world_size, checkpoint_every=2, failpoint="train.after_stepped@3")
        ranks[0].wait(PATIENCE_S)
        assert ranks[0].status == -signal.SIGKILL
        for rank in ranks:
            rank.kill()

    fed.drain(4)

    history = fed.history()
    assert [session.dp_world_size for session in history.sessions] == [4, 3, 4]
    assert [session.updated for session in history.sessions] == [(1, 2, 3), (3, 4, 5), (5, 6)]
    four, three, last = (_mini_batches(history, each.name) for each in history.sessions)
    for step, before, after in ((3, four, three), (5, three, last)):
        for mini_batch in range(2):
            assert before[step, mini_batch] == after[step, mini_batch]


def _mini_batches(history: History, session: str) -> dict[tuple[int, int], tuple[Any, Any]]:
    """Return the rows and denominators over all ranks: (step, mini-batch) -> both."""
    found: dict[tuple[int, int], tuple[Any, Any]] = {}
    for name, shares in history.received.items():
        if name.session == session:
            rows = [row for share in shares for row in share["rows"]]
            ordered = sorted(rows, key=lambda row: row["row"])
            found[name.step, name.mini_batch] = ordered, shares[0]["denominators"]
    return found
