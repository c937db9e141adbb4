"""The code of the README runs as it stands, on a real store and a real batcher."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

from turnstream.types import RecoveryToken, TrajectoryState
from turnstream_server.bus.ledger import read_ledger
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.jobs.services import start_batcher, store_environment
from turnstream_server.jobs.stack import Stack

README = Path(__file__).parents[3] / "README.md"


def blocks() -> list[str]:
    """The Python blocks of the README, as printed."""
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.grpc
def test_main_path_of_the_readme_runs_as_printed(
    own_server: EmbeddedServer,
    own_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", own_server.url)
    samples = [([1, 2, 3], [4, 5], [-0.5, -0.25]), ([1, 2, 3], [4, 6], [-0.5, -0.25])]
    trained: list[Any] = []
    saved: list[Any] = []
    names: dict[str, Any] = {
        "sample": lambda: samples[len(judged)],
        "judge": lambda response_ids: judged.append(response_ids) or float(len(judged)),
        "checkpoint": {},
        "model": "weights",
        "train": lambda batch, denominators: trained.append((batch, denominators)),
        "save": saved.append,
    }
    judged: list[Any] = []
    create, generate, train = blocks()
    with Stack(tmp_path, store_environment(own_server.url)) as stack:
        start_batcher(stack, name="batcher")

        exec(create, names)
        exec(generate, names)
        names["run"].close()
        worker = threading.Thread(target=exec, args=(train, names), daemon=True)
        worker.start()
        worker.join(90)

    assert not worker.is_alive()
    [(batch, denominators)] = trained
    assert batch.input_ids_BT.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
    assert denominators.num_tokens == 4
    assert [RecoveryToken.parse(each["turnstream"]).step for each in saved] == [1]
    assert read_ledger(own_client, "demo").by_state[TrajectoryState.COMMITTED] == 2
