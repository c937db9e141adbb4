"""Batchers that come back at another address: a worker finds them in the store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import turnstream
from testkit import group, wait_until
from testkit.batchers import BatcherThread
from testkit.processes import batcher_process
from turnstream.errors import BatcherUnavailableError
from turnstream.store.run.batchers import registered_batchers
from turnstream.worker import BatchStream
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.service import train

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

_names = itertools.count(1)


@pytest.fixture
def service() -> Iterator[turnstream.Service]:
    """A store of its own: batchers of other tests serve every run of theirs."""
    with EmbeddedServer() as server, turnstream.connect(server.url) as service:
        yield service


def publish(run: turnstream.Run) -> None:
    with run.publisher() as publisher:
        publisher.publish(group(f"g{next(_names)}")).result(30)


def test_waiting_worker_finds_a_batcher_at_another_address(
    service: turnstream.Service, tmp_path: Path
) -> None:
    run = service.create_run("moves", batch_groups=1)
    with ThreadPoolExecutor() as pool:
        with batcher_process(service.url, tmp_path / "first") as (_, first):
            batches = run.batches(timeout_s=120)
            waiting = pool.submit(next, batches)
        publish(run)  # the first batcher was killed, and stays registered for a while
        with batcher_process(service.url, tmp_path / "second") as (_, second):
            assert first != second
            step = waiting.result(100)
            assert len(list(step)) == 1
            assert step.done()
            batches.close()


def test_trainer_finds_a_batcher_at_another_address(
    service: turnstream.Service, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    run = service.create_run("moves", batch_groups=1)
    config = TrainerConfig(
        run=run.name,
        redis_url=service.url,
        folder=tmp_path / "trainer",
        small_model=SmallModelSpec(vocab_size=128, hidden_size=16, num_layers=1),
        learning_rate=1e-2,
        timeout_s=120.0,
        max_steps=2,
    )
    metrics = tmp_path / "trainer/metrics.jsonl"
    first, second = (BatcherThread(service.url) for _ in range(2))
    with ThreadPoolExecutor() as pool:
        with first:
            publish(run)
            training = pool.submit(train, config)
            wait_until(lambda: metrics.exists() and metrics.read_text(), 60, describe="step 1")
        with second:
            publish(run)
            training.result(100)

    assert second.target != first.target
    assert len(metrics.read_text().splitlines()) == 2


def test_stream_without_a_registered_batcher_times_out(service: turnstream.Service) -> None:
    service.create_run("alone", batch_groups=1)

    with pytest.raises(BatcherUnavailableError, match="no batcher is registered"):
        BatchStream(registered_batchers(service.url), "alone", timeout_s=0.5)
