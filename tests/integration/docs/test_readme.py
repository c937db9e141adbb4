"""The code of the README runs as it stands, on a real store and a real batcher."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from turnstream.generator import Publisher
from turnstream.types import TrajectoryState
from turnstream_server.bus.ledger import read_ledger
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.jobs.services import start_batcher, store_environment
from turnstream_server.jobs.stack import Stack

README = Path(__file__).parents[3] / "README.md"


def blocks(*, redis_url: str, batcher: str) -> list[str]:
    """The Python blocks of the README, with the addresses of this test."""
    text = README.read_text(encoding="utf-8")
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [
        block.replace("redis://localhost:6379", redis_url).replace("localhost:7600", batcher)
        for block in found
    ]


@pytest.mark.grpc
def test_the_main_path_of_the_readme_runs(
    own_server: EmbeddedServer, own_client: redis.Redis, tmp_path: Path
) -> None:
    trained: list[Any] = []
    saved: list[Any] = []
    with Stack(tmp_path, store_environment(own_server.url)) as stack:
        batcher = start_batcher(stack, name="batcher").address
        create, generate, train = blocks(redis_url=own_server.url, batcher=batcher)
        names = {
            "prompt_ids": [1, 2, 3],
            "response_ids": [4, 5],
            "logprobs": [-0.5, -0.25],
            "checkpoint": SimpleNamespace(token=None),
            "train_on": lambda batch, denominators: trained.append((batch, denominators)),
            "save_checkpoint": saved.append,
        }

        exec(create, names)
        exec(generate, names)
        _finish_the_group(own_server.url)
        worker = threading.Thread(target=exec, args=(train, names), daemon=True)
        worker.start()
        worker.join(90)

    assert not worker.is_alive()
    [(batch, denominators)] = trained
    assert batch.input_ids_BT.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
    assert denominators.num_tokens == 4
    assert [token.step for token in saved] == [1]
    assert read_ledger(own_client, "demo").by_state[TrajectoryState.COMMITTED] == 2


def _finish_the_group(url: str) -> None:
    """The second sample, and the end of the run."""
    with Publisher(url, run="demo") as publisher:
        with publisher.trajectory("visit-1", 1, num_samples=2, prompt_uid="task-7") as trajectory:
            trajectory.append([1, 2, 3], [4, 6], logprobs=[-0.5, -0.25], version=0)
            trajectory.seal(reward=0.0)
        publisher.close_run()
