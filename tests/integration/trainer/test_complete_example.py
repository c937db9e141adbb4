"""The complete trainer of the examples, as one rank in this process."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import testkit
import turnstream
from testkit.services.batchers import BatcherThread
from testkit.services.stores import client_of
from turnstream.types import Group, MiniBatch, TrajectoryState
from turnstream.worker.layouts import packed_to_torch
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.queries.ledger import read_ledger

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

EXAMPLE = Path(__file__).parents[3] / "examples/complete_trainer.py"


@pytest.fixture(scope="module")
def example() -> Any:
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("complete_trainer", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def publish(run: turnstream.Run, *numbers: int) -> None:
    """Write a group of two samples for each number; only "C" is rewarded."""
    members = [
        testkit.trajectory(testkit.turn("ab", response), sample=sample, reward=1.0 - sample)
        for sample, response in enumerate(("C", "DE"))
    ]
    with run.publisher() as publisher:
        for number in numbers:
            publisher.publish(Group(group_id=f"g{number}", trajectories=tuple(members)))


def test_complete_trainer_learns_and_continues_at_its_checkpoint(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["complete_trainer.py", "--folder", str(tmp_path)])
    with EmbeddedServer() as server, BatcherThread(server.url):
        monkeypatch.setenv("TURNSTREAM_REDIS_URL", server.url)
        run = turnstream.connect().create_run("demo", batch_groups=1, max_staleness=9)
        publish(run, 1, 2)
        run.close()
        example.main()
        run.reopen()
        publish(run, 3)
        run.close()
        example.main()
        with turnstream.connect() as service:
            states = read_ledger(client_of(service), "demo").by_state

    assert states[TrajectoryState.COMMITTED] == 6
    checkpoints = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-00000002", "checkpoint-00000003"]
    board = EventAccumulator(str(tmp_path)).Reload()
    assert [scalar.step for scalar in board.Scalars("train/loss")] == [1, 2, 3]
    first, last = example.load_model(None), example.load_model(tmp_path / checkpoints[-1])
    assert rewarded(last) > rewarded(first)


def rewarded(model: Any) -> float:
    """Return the probability of "C" after "ab"."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(testkit.ids("ab"))[None]).logits[0, -1]
    return logits.softmax(0)[ord("c")].item()


def test_packed_rows_of_the_complete_trainer_see_no_other_row(example: Any) -> None:
    model = example.load_model(None)
    rows = testkit.rows("abcdeFGH", "abC", "xyZ")
    [packed] = packed_to_torch(MiniBatch(rows=rows, info=testkit.mini_batch_info(rows)))

    found = example.logprobs(model, packed)

    bounds = packed.cu_seqlens.tolist()
    for begin, end in itertools.pairwise(bounds):
        ids = packed.input_ids_N[begin:end]
        logits = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        alone = logits[:-1].gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(found[begin : end - 1], alone, atol=1e-5, rtol=0.0)
