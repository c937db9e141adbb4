"""A trainer of two ranks under torchrun, in the lines that a user writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import turnstream
from testkit import group
from turnstream.store.client.connection import connect
from turnstream_server.bus.core.frontier import read_frontier

pytestmark = [pytest.mark.redis, pytest.mark.grpc, pytest.mark.timeout(300)]

TRAINER = """
import sys, pathlib, torch, torch.distributed as dist, turnstream

dist.init_process_group("gloo")
path = pathlib.Path(sys.argv[1]) / f"state-{dist.get_rank()}"
run = turnstream.connect().run("torchrun")
with run.batches(path.read_text() if path.exists() else None) as batches:
    for step in batches:
        for mini_batch in step:
            trained = mini_batch.to_torch().loss_mask_BR.sum()
            dist.all_reduce(trained)
            assert trained == mini_batch.denominators.num_tokens
        path.write_text(step.done())
        step.commit()
        if step.number == int(sys.argv[2]):
            break
"""


def train(folder: Path, url: str, *, until: int) -> None:
    """Run the trainer under torchrun until a step is committed."""
    script = folder / "trainer.py"
    script.write_text(TRAINER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*command, script, folder, str(until)],
        env={**os.environ, "TURNSTREAM_REDIS_URL": url, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=240,
    )


@pytest.mark.slow
def test_two_ranks_train_and_resume_without_barrier_or_session_name(
    server: Any, start_batcher: Callable[[], Any], tmp_path: Path
) -> None:
    start_batcher()
    with turnstream.connect(server.url) as service:
        run = service.create_run("torchrun", batch_groups=2, max_staleness=20)
        with run.publisher() as publisher:
            for number in range(6):
                publisher.publish(group(f"g{number}"))
        run.close()

    train(tmp_path, server.url, until=2)
    train(tmp_path, server.url, until=99)

    with connect(server.url) as client:
        frontier = read_frontier(client, "torchrun")
    assert (frontier.stepped, frontier.committed) == (3, 3)
    states = {(tmp_path / f"state-{rank}").read_text() for rank in range(2)}
    assert len(states) == 1
