from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import testkit
from testkit.training.training import (
    make_critic,
    make_engine,
    make_mini_batch,
    make_model,
    make_value_model,
)
from turnstream.batching.config.values import Estimator
from turnstream.errors import InvalidConfigError
from turnstream.types import RecoveryToken
from turnstream.worker.steps import Batches, PulledMiniBatch, epoch_order
from turnstream_server.models.policy import load_policy
from turnstream_server.trainer.checkpoint import Checkpoints
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.loop import Trainer
from turnstream_server.trainer.objectives.objective import Objective
from turnstream_server.trainer.reporting.declarations import METRICS, undeclared
from turnstream_server.trainer.reporting.sinks import read_steps


class StreamInMemory:
    """Steps of two mini-batches each, and a record of the calls of the trainer, in order."""

    def __init__(
        self,
        *,
        build: Callable[..., PulledMiniBatch] = make_mini_batch,
        first_step: int = 1,
        last_step: int,
        newest_version: int = -1,
        estimator: Estimator = "grpo",
    ) -> None:
        self.run = "demo"
        self.config = replace(testkit.config(2), estimator=estimator)
        self.newest_version = self.version_before = newest_version
        self.calls: list[Any] = []
        self.on_committed: Callable[[RecoveryToken], None] = lambda _: None
        self._build = build
        self.first_step = first_step
        self._steps = range(first_step, last_step + 1)
        self._step = 0

        self._mini_batches = self._pull()

    def __next__(self) -> PulledMiniBatch:
        return next(self._mini_batches)

    def _pull(self) -> Iterator[PulledMiniBatch]:
        for step in self._steps:
            self._step = step
            for index in range(2):
                self.calls.append(f"yield {step}.{index}")
                yield self._build(step=step, mini_batch=index, num_mini_batches=2)

    def stepped(self) -> RecoveryToken:
        """Names the step that was yielded last."""
        self.calls.append(f"stepped {self._step}")
        return RecoveryToken(lineage="main", step=self._step, chain_hash="ab")

    def committed(self, state: str) -> None:
        """Asks the test first."""
        token = RecoveryToken.parse(state)
        self.on_committed(token)
        self.calls.append(f"committed {token.step}")

    def statistics(self) -> Any:
        """No time waiting."""
        return SimpleNamespace(wait_s=0.0)

    def announce_version(self, version: int, *, step: int, weights_uri: str) -> None:
        """The weights must be there already."""
        assert Path(weights_uri.removeprefix("file://"), "model.safetensors").is_file()
        self.newest_version = version
        self.calls.append(f"version {version} after {step}")


def _config(folder: Path, **changes: Any) -> TrainerConfig:
    fields = {"checkpoint_every": 2, **changes}
    return TrainerConfig(run="run", folder=folder, **fields)


def _train(
    stream: StreamInMemory, folder: Path, *, engine: Engine | None = None, **changes: Any
) -> list[str]:
    """Train to the end of the stream and return the calls of the trainer."""
    config = _config(folder, **changes)
    checkpoints = Checkpoints(config.folder / "checkpoints")
    batches = Batches(cast("Any", stream))
    trainer = Trainer(engine or make_engine(), batches, config=config, checkpoints=checkpoints)
    trainer.train(from_step=stream.first_step - 1)
    return stream.calls


def test_a_step_is_acknowledged_then_published_and_every_second_one_saved(tmp_path: Path) -> None:
    stream, saved = StreamInMemory(last_step=3), list[int]()

    def check(token: RecoveryToken) -> None:
        newest = Checkpoints(tmp_path / "checkpoints").newest()
        assert newest is not None
        assert newest.token == token  # it is on disk before it is committed
        saved.append(token.step)

    stream.on_committed = check
    calls = _train(stream, tmp_path)

    assert saved == [2, 3]
    assert calls == [
        "version 0 after 0",
        *("yield 1.0", "yield 1.1", "stepped 1", "version 1 after 1"),
        *("yield 2.0", "yield 2.1", "stepped 2", "version 2 after 2", "committed 2"),
        *("yield 3.0", "yield 3.1", "stepped 3", "version 3 after 3"),
        "committed 3",  # the end of the run
    ]
    lines = read_steps(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["version"]) for line in lines] == [(1, 1), (2, 2), (3, 3)]
    first = lines[0]
    assert first["num_trajectories"] == first["num_rows"] == 8
    assert first["num_trained_tokens"] == 2 * 9
    assert first["num_tokens"] == 2 * (7 + 2 + 6 + 5)
    assert (first["reward_mean"], first["num_updates"]) == (1.0, 2)
    assert undeclared(first) == []
    assert {metric.name for metric in METRICS if not metric.is_optional} <= first.keys()


def test_trainer_stops_above_its_share_of_masked_tokens(tmp_path: Path) -> None:
    def build(**info: Any) -> PulledMiniBatch:
        mini_batch = make_mini_batch(**info)
        trained = mini_batch.rows.trajectory_num_tokens.copy()
        trained[0] = 0  # 7 of 20 tokens
        return replace(mini_batch, rows=replace(mini_batch.rows, trajectory_num_tokens=trained))

    stream = StreamInMemory(build=build, last_step=2)
    _train(stream, tmp_path / "below", max_masked_share=0.36)

    stream = StreamInMemory(build=build, last_step=2)
    with pytest.raises(InvalidConfigError, match=r"step 1: 35.0% of the tokens .* allowed are 25"):
        _train(stream, tmp_path / "above", max_masked_share=0.25)
    assert read_steps(tmp_path / "below/metrics.jsonl")[0]["masked_share"] == 0.35
    assert not [each for each in stream.calls if each.startswith("committed")]


def test_the_last_three_versions_stay_after_those_of_a_dead_trainer(tmp_path: Path) -> None:
    # Versions 3 to 5 were made after step 2 by a trainer that died: their names stay taken.
    engine = make_engine()
    stream = StreamInMemory(first_step=3, last_step=7, newest_version=5)

    calls = _train(stream, tmp_path, engine=engine)

    assert calls[0] == "version 6 after 2"
    assert "version 11 after 7" in calls
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["v10", "v11", "v9"]
    published = load_policy(tmp_path / "weights" / "v11")
    for mine, theirs in zip(engine.model.parameters(), published.parameters(), strict=True):
        assert mine.equal(theirs)


def test_skipped_updates_are_counted_with_their_reasons(tmp_path: Path) -> None:
    def build(*, step: int, mini_batch: int, **info: Any) -> PulledMiniBatch:
        is_bad = (step, mini_batch) == (1, 1)
        advantages = [float("inf") if is_bad else 1.0, 1.0, -1.0, -1.0]
        return make_mini_batch(advantages=advantages, step=step, mini_batch=mini_batch, **info)

    _train(StreamInMemory(build=build, last_step=2), tmp_path)

    first, second = read_steps(tmp_path / "metrics.jsonl")
    assert [first["num_skipped_updates"], second["num_skipped_updates"]] == [1, 0]
    assert [first["total_skipped_updates"], second["total_skipped_updates"]] == [1, 1]
    assert "gradient norm is nan" in first["skip_reasons"][0]
    assert second["skip_reasons"] == []


def test_epochs_acknowledge_a_step_once_and_count_each_row_once(tmp_path: Path) -> None:
    calls = _train(
        StreamInMemory(last_step=2), tmp_path / "two", epochs=2, dump_folder=tmp_path / "rows"
    )
    _train(StreamInMemory(last_step=2), tmp_path / "one")

    assert [call for call in calls if "stepped" in call] == ["stepped 1", "stepped 2"]
    two, one = (read_steps(tmp_path / name / "metrics.jsonl")[0] for name in ("two", "one"))
    assert (two["num_updates"], one["num_updates"]) == (4, 2)
    counts = [name for name in one if name.startswith("num_") and name != "num_updates"]
    assert {"num_rows", "num_trajectories", "num_inert_rows"} < set(counts)
    assert [two[name] for name in counts] == [one[name] for name in counts]
    assert len([*(tmp_path / "rows").iterdir()]) == 4


@pytest.mark.parametrize("proximal", ["rollout", "recompute"])
def test_shuffled_epochs_equal_updates_by_hand_in_drawn_order(
    proximal: str, tmp_path: Path
) -> None:
    objective = Objective(_config(tmp_path, proximal=proximal).objective)
    engine, by_hand = (make_engine(objective=objective) for _ in range(2))
    orders = {
        (step, epoch): epoch_order(2, seed=7, step=step, epoch=epoch)
        for step in (1, 2)
        for epoch in (1, 2)
    }
    assert len({tuple(order) for order in orders.values()}) == 2  # both orders occur

    def build(*, mini_batch: int, **info: Any) -> PulledMiniBatch:
        advantages = [(1.0, -0.5, 0.25, -1.5), (-2.0, 0.5, 1.0, 0.0)][mini_batch]
        return make_mini_batch(advantages=advantages, mini_batch=mini_batch, **info)

    _train(
        StreamInMemory(build=build, last_step=2),
        tmp_path,
        engine=engine,
        epochs=3,
        shuffle=True,
        seed=7,
        proximal=proximal,
    )

    for step in (1, 2):
        of_step = [build(step=step, mini_batch=index, num_mini_batches=2) for index in range(2)]
        old = [by_hand.logprobs(each) if proximal == "recompute" else None for each in of_step]
        for index in [0, 1, *orders[step, 1], *orders[step, 2]]:
            by_hand.update(of_step[index], aggregation="token_mean", old=old[index])
    for mine, theirs in zip(engine.model.parameters(), by_hand.model.parameters(), strict=True):
        assert mine.equal(theirs)


def test_metrics_have_the_statistics_of_the_objective(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "correction": ["tis", "mis:low=0.5,high=1.2"],
        "kl": "k3:coefficient=0.5,target=1e-6,horizon=8",
        "entropy_bonus": 0.01,
    }
    objective = Objective(_config(tmp_path, **options).objective)
    engine = make_engine(objective=objective, reference=make_model(seed=3))

    _train(StreamInMemory(last_step=1), tmp_path, engine=engine, **options)

    (line,) = read_steps(tmp_path / "metrics.jsonl")
    assert 0 < line["masked_share_mis"] < 1
    assert 0 < line["weight_tis"] < 2
    assert 0 < line["logprob_gap"] < line["logprob_gap_max"]
    assert line["kl_reference"] > 0
    assert line["kl_coefficient"] == pytest.approx(0.55)  # the second update's
    assert 4 < line["entropy"] < 5
    sides = line["clipped_low_share"] + line["clipped_high_share"]
    assert sides == pytest.approx(line["clipped_share"])


def test_metrics_have_the_statistics_of_the_critic(tmp_path: Path) -> None:
    critic = make_critic(make_value_model(head_std=0.0), text="learning_rate=1e-2")
    build = partial(make_mini_batch, advantages=[0.0] * 4)
    stream = StreamInMemory(build=build, last_step=2, estimator="gae")

    _train(stream, tmp_path, engine=make_engine(critic=critic), critic="policy", epochs=2)

    first, second = read_steps(tmp_path / "metrics.jsonl")
    assert first["value_mean"] == 0.0 < second["value_mean"]
    assert 0 < first["return_mean"] < 1
    assert second["value_loss"] < first["value_loss"] < 0.5
    assert first["critic_gradient_norm"] > 0
    assert 0 < first["value_clipped_share"] < 1
    assert first["total_skipped_critic_updates"] == 0
    assert first["gradient_norm"] > 0  # the shipped advantages are 0
    assert undeclared(first) == []


@pytest.mark.parametrize(
    ("estimator", "critic", "message"),
    [
        ("gae", None, "^--critic: none, and the run has estimator='gae': .* --critic policy"),
        ("rloo", "policy", "^--critic: policy, and the run has estimator='rloo': create one"),
    ],
)
def test_trainer_refuses_a_run_that_does_not_fit_its_critic(
    estimator: Estimator, critic: str | None, message: str, tmp_path: Path
) -> None:
    stream = StreamInMemory(last_step=1, estimator=estimator)

    with pytest.raises(InvalidConfigError, match=message):
        _train(stream, tmp_path, critic=critic)
    assert stream.calls == []
