"""Hosted models that train on the batches of a run."""

from __future__ import annotations

import functools
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch
from safetensors.torch import load_file

import testkit
from testkit.services.batchers import BatcherThread
from testkit.training.hosted import (
    STEP,
    HostedClient,
    ModelHost,
    Undisturbed,
    datums,
    new_model_host,
    save,
    serve_ranks,
)
from testkit.training.ranks import run_ranks
from turnstream.batching.config import BatchingConfig
from turnstream.batching.packing.microbatch import Budget
from turnstream.generator import Publisher
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import close_run, create_run, reopen_run
from turnstream.types import Group, TrajectoryState
from turnstream.worker import BatchStream
from turnstream_server.batcher.assembly import operation_shares
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.engine.hosted_base import EngineSettings, HostedBase, LoadedModel, write
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.queries.ledger import read_ledger
from turnstream_server.operations.contents import ForwardBackwardRun, LoadWeights
from turnstream_server.operations.results import TrainingOutput
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.objectives.config import ObjectiveConfig
from turnstream_server.trainer.objectives.objective import Objective
from turnstream_server.trainer.settings import AdamSettings

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

_SMALL = Budget(limit=8)
_numbers = itertools.count(1)


@pytest.fixture
def batcher(server: EmbeddedServer) -> Iterator[str]:
    """The address of a batcher."""
    with BatcherThread(server.url) as batcher:
        yield batcher.target


@pytest.fixture
def model_host(server: EmbeddedServer, base: Path, batcher: str, tmp_path: Path) -> ModelHost:
    """A base model whose workers begin trainer sessions at the batcher."""
    return new_model_host(server.url, base, tmp_path)._replace(batcher=batcher)


def make_run(url: str, *, num_groups: int, closes: bool = False, **fields: Any) -> str:
    """Return a new run with groups, two of which are a step."""
    run = f"fleet-{next(_numbers)}"
    settings = {"batch_groups": 2, "mini_batch_groups": 1, "max_staleness": 100, **fields}
    with connect(url) as client:
        create_run(client, run, BatchingConfig(**settings))
        publish(url, run, range(num_groups))
        if closes:
            close_run(client, run)
    return run


def publish(url: str, run: str, groups: range) -> None:
    """Publish groups of two trajectories; no two groups are equal."""
    with Publisher(url, run) as publisher:
        for number in groups:
            word = "CDEFGHIJKLMNOPQRSTUVWXYZ"[number:]
            good, bad = testkit.turn("ab", word, logprobs=-4.0), testkit.turn("abc", word[:1])
            trajectories = (
                testkit.trajectory(good, sample=0, reward=1.0),
                testkit.trajectory(bad, sample=1, reward=0.25 * (number % 3)),
            )
            publisher.publish(Group(group_id=f"g{number}", trajectories=trajectories)).result(30)


def on(run: str, **settings: float) -> ForwardBackwardRun:
    """Return a call on a run."""
    return ForwardBackwardRun(run, "ppo", settings)


def make_busy(model_host: ModelHost, run: str) -> HostedClient:
    """Return a model with six mini-batches of a run, a load between two of one step among them."""
    model = model_host.make(on(run), STEP, on(run), STEP, datums(1), on(run), STEP, save("mid"))
    model.submit(LoadWeights(model.path("mid"), optimizer=True), on(run), STEP)
    model.submit(on(run), on(run), STEP, save("end"))
    return model


def steps_of(model: HostedClient) -> list[float]:
    """Return the step of the run of each call that was trained."""
    results = [each for _, each in sorted(model.results().items())]
    outputs = [each for each in results if isinstance(each, TrainingOutput)]
    return [each.metrics["step:max"] for each in outputs if "step:max" in each.metrics]


def test_model_on_a_run_equals_a_trainer_of_it(
    model_host: ModelHost,
    client: redis.Redis,
    batcher: str,
    tmp_path: Path,
) -> None:
    run, other = (
        make_run(model_host.url, num_groups=4, aggregation="seq_mean_token_mean") for _ in range(2)
    )
    settings = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}
    model = model_host.make(*[on(run, **settings), STEP] * 4, save("end"))
    positions: dict[int, tuple[int, int]] = {}

    def is_done() -> bool:
        frontier = read_frontier(client, run)
        num_results = len(model.stored_results())
        positions.setdefault(num_results - 1, (frontier.stepped, frontier.committed))
        return num_results == model.num_operations

    model_host.run(model, until=is_done, checkpoint_every=4)

    expected = trained(model_host, model, other, loss="ppo_clip:clip_low=0.1,clip_high=0.3")
    weights = model.saved("end")
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-7)
    assert [positions[each] for each in (2, 4, 6, 8)] == [(0, 0), (1, 0), (1, 0), (2, 2)]
    output = model.results()[1]
    assert isinstance(output, TrainingOutput)
    assert [each.tolist() for each in output.logprobs] == [[0.0]]
    assert output.metrics["trajectories:sum"] == 2
    assert output.metrics["tokens:sum"] == 25
    assert output.metrics["reward:mean"] == 0.5
    assert steps_of(model) == [1, 1, 2, 2]


def trained(
    model_host: ModelHost, model: HostedClient, run: str, *, loss: str
) -> dict[str, torch.Tensor]:
    """Return the weights after the training of a run without a worker."""
    hosted = HostedBase(model_host.name, model_host.base, settings=EngineSettings())
    adapter = hosted.make(model.record).adapter
    assert adapter is not None
    adam = AdamSettings(
        learning_rate=0.05, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, max_grad_norm=0.0
    )
    objective = Objective(ObjectiveConfig.parse(loss=loss))
    engine = Engine(adapter.model, adapter=adapter, adam=adam, objective=objective)
    with BatchStream(model_host.batcher, run) as stream:
        for mini_batch in itertools.islice(stream, 4):
            engine.update(mini_batch, aggregation=stream.config.aggregation)
            if mini_batch.is_last:
                stream.stepped()
    folder = model_host.root / "direct"
    folder.mkdir()
    write(LoadedModel(engine, adapter), folder, optimizer=False)
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(
    server: EmbeddedServer, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    model_host = new_model_host(server.url, base, tmp_path_factory.mktemp("undisturbed"))
    run = make_run(server.url, num_groups=6)
    with BatcherThread(server.url) as batcher:
        model_host = model_host._replace(batcher=batcher.target)
        model = make_busy(model_host, run)
        model_host.run(model)
    return Undisturbed.of(model, run)


@pytest.mark.parametrize(
    "failpoint",
    [
        "engine.after_run@2",  # a gradient of a run, without a result
        pytest.param("engine.after_run@4", marks=pytest.mark.campaign),
        "engine.after_stepped",  # a run has the step, the result is not written
        "engine.after_finish@7",
        "engine.before_cover@3",
        "engine.before_committed",  # the checkpoint has a step that is not committed
        "engine.after_cover@3",  # the load, between two mini-batches of a step
        pytest.param("engine.after_finish@11", marks=pytest.mark.campaign),
        pytest.param("engine.after_stepped@3", marks=pytest.mark.campaign),
    ],
)
def test_killed_worker_trains_each_mini_batch_once_to_equal_weights(
    model_host: ModelHost,
    client: redis.Redis,
    undisturbed: Undisturbed,
    failpoint: str,
) -> None:
    run = make_run(model_host.url, num_groups=6)
    model = make_busy(model_host, run)
    process = model_host.start(failpoint)
    process.join(60)
    before = model.stored_results()

    model_host.run(model)

    assert process.exitcode == -signal.SIGKILL
    after = model.stored_results()
    assert {number: after[number] for number in before} == before
    undisturbed.require(model, run)
    assert steps_of(model) == [1, 1, 2, 2, 3, 3]
    frontier = read_frontier(client, run)
    assert (frontier.stepped, frontier.committed) == (3, 3)
    assert read_ledger(client, run).by_state[TrajectoryState.COMMITTED] == 12


def test_waiting_for_a_batch_blocks_no_other_model(
    model_host: ModelHost, client: redis.Redis
) -> None:
    run = make_run(model_host.url, num_groups=0)
    waiting = model_host.make(on(run), STEP)
    other = model_host.make(*[each for seed in range(5) for each in (datums(seed), STEP)])
    was_published = False

    def is_done() -> bool:
        nonlocal was_published
        if len(other.stored_results()) == other.num_operations and not was_published:
            assert len(waiting.stored_results()) == 1
            publish(model_host.url, run, range(2))
            was_published = True
        return len(waiting.stored_results()) == waiting.num_operations

    model_host.run(waiting, other, until=is_done)

    assert steps_of(waiting) == [1]
    assert read_frontier(client, run).stepped == 0  # the step has another mini-batch


def test_finished_run_is_refused_until_it_is_reopened(
    model_host: ModelHost, client: redis.Redis
) -> None:
    run = make_run(model_host.url, num_groups=2, closes=True, mini_batch_groups=2)
    model = model_host.make(on(run), STEP, on(run), datums(1), STEP, on(run))
    model_host.run(model)

    reopen_run(client, run)
    publish(model_host.url, run, range(2, 4))
    model.submit(on(run), STEP, datums(2), STEP)
    model_host.run(model)

    for number in (3, 6):
        assert model.failure(number).category == "user"
        assert f"run '{run}' is finished" in model.failure(number).error
    assert steps_of(model) == [1, 2]
    assert model.answer(10).content["metrics"]["skipped"] == 0
    assert read_frontier(client, run).stepped == 2


def test_next_step_of_a_run_needs_an_optim_step(model_host: ModelHost, client: redis.Redis) -> None:
    run = make_run(model_host.url, num_groups=4, mini_batch_groups=2)
    model = model_host.make(on(run), on(run), STEP, on(run), STEP)

    model_host.run(model)

    assert "call optim_step before the next one" in model.failure(2).error
    assert model.failure(2).category == "user"
    assert steps_of(model) == [1, 2]
    assert read_frontier(client, run).stepped == 2


def test_runs_that_cannot_be_trained_are_refused(
    model_host: ModelHost, client: redis.Redis
) -> None:
    critic = make_run(model_host.url, num_groups=2, estimator="gae")
    committed = make_run(model_host.url, num_groups=2, mini_batch_groups=2)
    with BatchStream(model_host.batcher, committed) as stream:
        next(stream)
        stream.committed(stream.stepped())
    wide = make_run(model_host.url, num_groups=2, pad_token_id=999)
    model = model_host.make(on("no-run"), on(critic), on(committed), on(wide), datums(1), STEP)

    model_host.run(model)

    expected = ["no run named 'no-run'", "has no critic", "committed up to step 1", "token is 999"]
    for number, words in enumerate(expected, 1):
        assert model.failure(number).category == "user"
        assert words in model.failure(number).error
    assert model.answer(6).content["metrics"]["skipped"] == 0
    assert read_frontier(client, critic).session_epoch == 0


def test_another_trainer_takes_a_run_over(model_host: ModelHost, client: redis.Redis) -> None:
    run = make_run(model_host.url, num_groups=6, mini_batch_groups=2)
    model = model_host.make(on(run), STEP)
    model_host.run(model, until=lambda: len(model.stored_results()) == 3, checkpoint_every=100)
    token = read_frontier(client, run)
    assert (token.stepped, token.committed) == (1, 1)
    model.submit(on(run), STEP)
    taken = False

    def take_over() -> bool:
        nonlocal taken
        if len(model.stored_results()) == 5 and not taken:
            newest = "v1:main:0:"
            with BatchStream(model_host.batcher, run, recovery_token=newest) as stream:
                next(stream)
            taken = True
            model.submit(on(run), datums(1), STEP, on(run))
        return len(model.stored_results()) == model.num_operations

    model_host.run(model, until=take_over, checkpoint_every=100)
    model.submit(datums(2), STEP, on(run))
    model_host.run(model)

    assert model.num_operations == 12
    for number in (5, 8, 11):
        assert "trainer session" in model.failure(number).error
        assert model.failure(number).category == "user"
    for number in (7, 10):
        assert model.answer(number).content["metrics"]["skipped"] == 0


def make_uneven(model_host: ModelHost) -> HostedClient:
    """Return a model whose first call has more rows than ranks, and whose last one has fewer.

    A call that fails has several passes, and so has the next one.
    """
    bad = datums(3, *[6] * 8)
    bad.data[0].model_input[1] = 500  # on one rank alone
    model = model_host.make(
        datums(1, 5, 3, 7), datums(2, 4, loss="dro"), STEP, save("mid"), bad, STEP
    )
    calls = (datums(4, *[5] * 8), STEP, datums(4), STEP, save("end"))
    model.submit(LoadWeights(model.path("mid"), optimizer=True), *calls)
    return model


def test_two_ranks_equal_one(
    model_host: ModelHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes more than 5 s: two ranks start over gloo, with torch."""
    monkeypatch.setattr(operation_shares, "_BUDGET", _SMALL)
    (one, one_run), (two, two_run) = (
        (make_uneven(model_host), make_busy(model_host, make_run(model_host.url, num_groups=6)))
        for _ in range(2)
    )
    model_host.run(one, one_run)

    job = functools.partial(serve_ranks, model_host, [two, two_run], budget=_SMALL)
    run_ranks([2], tmp_path, job)

    assert two.failure(5).category == one.failure(5).category == "server"
    results, expected = two.results(), one.results()
    for number in (1, 2, 8, 10):
        output, wanted = results[number], expected[number]
        assert isinstance(output, TrainingOutput)
        assert isinstance(wanted, TrainingOutput)
        for actual, values in zip(output.logprobs, wanted.logprobs, strict=True):
            np.testing.assert_allclose(actual, values, rtol=1e-4)
    assert steps_of(two_run) == [1, 1, 2, 2, 3, 3]
    for pair, rtol, atol in (((one, two), 1e-4, 1e-6), ((one_run, two_run), 1e-3, 1e-5)):
        weights, others = (model.saved("end") for model in pair)
        for name, value in weights.items():
            torch.testing.assert_close(others[name], value, rtol=rtol, atol=atol)
