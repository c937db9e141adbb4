"""A trainer that is killed outright, between its two acknowledgements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from testkit import wait_until
from turnstream.batching.config import BatchingConfig
from turnstream.generator import Publisher
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream.types import Group, Trajectory, Turn, VersionRun
from turnstream_server.bus.queries.ledger import read_ledger
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.jobs.services import (
    start_batcher,
    start_service,
    store_environment,
    write_policy,
)
from turnstream_server.jobs.stack import Service, Stack
from turnstream_server.models.spec import SmallModelSpec

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

RUN = "killed"
NUM_STEPS = 4
GROUPS_PER_STEP = 2
MODEL = SmallModelSpec(vocab_size=32, hidden_size=16, num_layers=1, num_heads=2)


def publish(url: str, *, steps: range, close: bool = False) -> None:
    """The groups of these steps, each of two trajectories of one turn."""
    with Publisher(url, RUN) as publisher:
        for step in steps:
            rng = np.random.default_rng(step)
            for index in range(GROUPS_PER_STEP):
                members = [_trajectory(rng, sample=sample) for sample in range(2)]
                publisher.publish(Group(group_id=f"g{step}-{index}", trajectories=members))
        publisher.flush()
        if close:
            publisher.close_run()


def _trajectory(rng: np.random.Generator, *, sample: int) -> Trajectory:
    turn = Turn(
        prompt_ids=rng.integers(0, 32, 5, dtype=np.int32),
        response_ids=rng.integers(0, 32, 7, dtype=np.int32),
        logprobs=np.full(7, -3.5, np.float32),
        version_runs=(VersionRun(0, 7),),
    )
    return Trajectory(turns=[turn], sample=sample, reward=float(sample))


def dumped(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the rows that a trainer saw, by the name of the mini-batch."""
    files = {}
    for path in sorted(folder.glob("step-*.npz")):
        with np.load(path) as columns:
            files[path.stem] = {name: columns[name] for name in columns}
    return files


@pytest.fixture
def store() -> Iterator[tuple[str, redis.Redis]]:
    """A store with the run: its URL, and a client of it."""
    with EmbeddedServer() as server, connect(server.url) as client:
        config = BatchingConfig(
            batch_groups=GROUPS_PER_STEP,
            mini_batch_groups=GROUPS_PER_STEP,
            max_staleness=NUM_STEPS,
        )
        create_run(client, RUN, config)
        yield server.url, client


def test_a_trainer_killed_after_stepped_and_before_committed_gets_the_batches_again(
    store: tuple[str, redis.Redis], tmp_path: Path
) -> None:
    url, client = store

    def states() -> dict[str, int]:
        by_state = read_ledger(client, RUN).by_state
        return {str(state): count for state, count in by_state.items() if count}

    def start_trainer(stack: Stack, name: str, *, batcher: str) -> Service:
        return start_service(
            stack,
            "trainer",
            name,
            run=RUN,
            batcher=batcher,
            policy=write_policy(tmp_path, MODEL),
            folder=tmp_path / "trainer",
            checkpoint_every=NUM_STEPS,
            threads=1,
            dump=tmp_path / name,
        )

    # The groups of the last step are missing, so the first trainer cannot come to its checkpoint.
    publish(url, steps=range(1, NUM_STEPS))
    with Stack(tmp_path, store_environment(url)) as stack:
        batcher = start_batcher(stack, name="batcher").address
        first = start_trainer(stack, "first", batcher=batcher)
        wait_until(
            lambda: states() == {"stepped": (NUM_STEPS - 1) * GROUPS_PER_STEP * 2},
            timeout_s=150,
            describe="all steps but the last are stepped",
        )
        first.kill()
        publish(url, steps=range(NUM_STEPS, NUM_STEPS + 1), close=True)
        second = start_trainer(stack, "second", batcher=batcher)
        second.wait(150)
        second.check()

    before, after = dumped(tmp_path / "first"), dumped(tmp_path / "second")
    assert list(before) == [f"step-{step:06}-0" for step in range(1, NUM_STEPS)]
    assert list(after) == [*before, f"step-{NUM_STEPS:06}-0"]
    for name, columns in before.items():
        assert columns.keys() == after[name].keys()
        for column, values in columns.items():
            assert np.array_equal(values, after[name][column]), (name, column)
    assert states() == {"committed": NUM_STEPS * GROUPS_PER_STEP * 2}
