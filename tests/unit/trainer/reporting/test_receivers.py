"""Prometheus, TensorBoard and wandb, read back as their users read them."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from testkit import wait_until
from testkit.services.receivers import (
    tensorboard_scalars,
    tensorboard_tags,
    wandb_history,
    wandb_records,
)
from turnstream.errors import InvalidConfigError
from turnstream_server.listener import serve_metrics
from turnstream_server.telemetry.readiness import Readiness
from turnstream_server.trainer.reporting.declarations import METRICS
from turnstream_server.trainer.reporting.sinks import Prometheus, TensorBoard, Wandb

COMPLETE = {metric.name: 1.0 for metric in METRICS if metric.kind}


def scrape() -> dict[str, tuple[float, str, dict[str, str]]]:
    """Value, type and labels of every sample of this process, keyed by its name."""
    with (
        serve_metrics("127.0.0.1", 0, readiness=Readiness("trainer")) as server,
        urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as reply,
    ):
        text = reply.read().decode()
    return {
        sample.name: (sample.value, family.type, sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_has_gauges_of_the_newest_step_and_sums_until_closed() -> None:
    with contextlib.closing(Prometheus(run='a "run"')) as prometheus:
        prometheus.write(1, {"step": 1, "loss": 0.5, "kl": 0.25, "num_tokens": 100, "wait_s": 0.5})
        changes = {"kl": None, "num_tokens": 50, "wait_s": 0.0, "num_skipped_updates": 0}
        prometheus.write(2, {"step": 2, "loss": -1.5, **changes})
        found = scrape()
        prometheus.write(3, {**COMPLETE, "figures": {"tags": {}}})
        complete = scrape()

    labels = {"run": 'a "run"'}
    assert found["turnstream_trainer_step"] == (2.0, "gauge", labels)
    assert found["turnstream_trainer_loss"] == (-1.5, "gauge", labels)
    assert found["turnstream_trainer_tokens_total"] == (150.0, "counter", labels)
    assert found["turnstream_trainer_wait_seconds_total"] == (0.5, "counter", labels)
    assert found["turnstream_trainer_skipped_updates_total"][0] == 0.0
    assert "turnstream_trainer_kl" not in found  # the newest step has none
    assert found["process_cpu_seconds_total"][0] > 0
    own = {name for name, (_, _, of) in complete.items() if of == labels}
    assert own == {metric.prometheus_name for metric in METRICS if metric.kind}
    assert "turnstream_trainer_step" not in scrape()


def test_tensorboard_shows_the_later_value_of_a_repeated_step(tmp_path: Path) -> None:
    def write(losses: dict[int, float], *, from_step: int) -> None:
        sink = TensorBoard(tmp_path, from_step=from_step)
        for step, loss in losses.items():
            sink.write(step, {"step": step, "loss": loss})
        sink.close()

    write({1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}, from_step=0)
    write({3: 0.5}, from_step=2)  # and then the process was killed

    steps = tensorboard_scalars(tmp_path, "policy/loss")
    assert [(step, round(value, 6)) for step, value in steps] == [(1, 0.1), (2, 0.2), (3, 0.5)]


def test_tensorboard_has_a_step_on_disk_before_it_is_closed(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path, from_step=0)
    sink.write(1, {**COMPLETE, "mfu": None, "figures": {"tags": {}}})

    found = tensorboard_tags(tmp_path)

    assert found == {metric.tag for metric in METRICS if metric.kind} - {"device/mfu"}
    sink.close()


def test_wandb_resumes_its_run_and_has_the_step_as_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")

    def write(losses: dict[int, float]) -> None:
        sink = Wandb("project", run="my run", folder=tmp_path)
        for step, loss in losses.items():
            sink.write(step, {"step": step, "loss": loss, "kl": None})
        sink.close()

    write({1: 0.5, 2: 0.25})
    # wandb names the files of a start by the second.
    second = int(time.time())
    wait_until(lambda: time.time() >= second + 1, timeout_s=5, describe="another second")
    write({2: 0.75})

    def logged() -> list[tuple[int, float]]:
        return [(each["progress/step"], each["policy/loss"]) for each in wandb_history(tmp_path)]

    # A process of wandb writes the files, and may still write when `finish` has returned.
    expected = [(1, 0.5), (2, 0.25), (2, 0.75)]
    wait_until(lambda: logged() == expected, describe=f"{expected} in the files of wandb")
    records = wandb_records(tmp_path)
    runs = [each.run for each in records if each.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {
        ((tmp_path / "wandb-id").read_text(), "project", "my run")
    }
    axes = [each.metric for each in records if each.WhichOneof("record_type") == "metric"]
    assert {axis.step_metric for axis in axes if axis.glob_name == "*"} == {"progress/step"}


def test_wandb_that_refuses_to_start_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")

    with pytest.raises(InvalidConfigError, match=r"^--wandb: wandb does not start: "):
        Wandb("a/b:c", run="r", folder=tmp_path)
