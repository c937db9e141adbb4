from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from turnstream.errors import InvalidConfigError
from turnstream_server.console.results import read_metrics
from turnstream_server.trainer.reporting.plot import draw, plot_metrics, running_mean

AWAY = "redis://127.0.0.1:1"


def step(number: int, **changes: Any) -> dict[str, Any]:
    """A line of metrics."""
    return {
        "step": number,
        "reward_mean": number / 10,
        "loss": -0.5,
        "kl": 0.01,
        "tokens_per_s": 2_000.0 + number,
        "trained_tokens_per_s": 900.0,
        **changes,
    }


def write(path: Path, steps: Sequence[dict[str, Any]]) -> Path:
    """Write a file of metrics."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in steps))
    return path


def test_lines_have_the_values_of_the_steps_and_gaps_for_null() -> None:
    steps = [step(4, kl=None), step(5, loss=None, kl=None), step(6, kl=None)]

    reward, loss, kl, tokens = axes = draw(steps, title="").axes

    texts = [[text.get_text() for text in each.texts] for each in axes]
    assert texts == [[], [], ["no values"], []]
    np.testing.assert_array_equal(reward.lines[0].get_data(), [[4, 5, 6], [0.4, 0.5, 0.6]])
    np.testing.assert_array_equal(loss.lines[0].get_ydata(), [-0.5, math.nan, -0.5])
    assert kl.get_ylabel() == "KL(behaviour || current) (nats)"
    assert tokens.get_ylim()[0] == 0
    legend = tokens.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "tokens of the rows",
        "tokens in the loss",
    ]


def test_long_run_is_an_image_with_its_mean_over_named_steps(tmp_path: Path) -> None:
    steps = [step(number) for number in range(1, 101)]

    plot_metrics(steps, tmp_path / "plot.png", title="a $title [x")
    figure = draw(steps, title="")

    assert imread(tmp_path / "plot.png").shape[:2] == (975, 1500)
    thin, thick, _ = figure.axes[0].lines
    assert thin.get_linewidth() < thick.get_linewidth()
    means = running_mean([each["reward_mean"] for each in steps], 5)
    assert list(np.asarray(thick.get_ydata())) == pytest.approx(means)
    assert "mean over 5 steps" in figure.get_supxlabel()


@pytest.mark.parametrize("window", [1, 2, 3, 7])
def test_running_mean_is_that_of_a_slow_loop(window: int) -> None:
    values = [*np.random.default_rng(0).normal(size=20).tolist(), math.nan, 1.0]
    expected = []
    for position in range(len(values)):
        first = position - window // 2
        near = [values[i] for i in range(first, first + window) if 0 <= i < len(values)]
        known = [value for value in near if not math.isnan(value)]
        expected.append(sum(known) / len(known) if known else math.nan)

    np.testing.assert_allclose(running_mean(values, window), expected)


@pytest.mark.parametrize("source", ["", "metrics.jsonl", "job"])
def test_metrics_are_found_in_a_folder_a_job_or_a_file(source: str, tmp_path: Path) -> None:
    folder = tmp_path / "job/trainer" if source == "job" else tmp_path
    path = write(folder / "metrics.jsonl", [step(1)])

    found = read_metrics(str(tmp_path / source), redis_url=AWAY)

    assert found == (str(path), [step(1)])


def test_source_without_metrics_is_refused_with_the_places_that_were_read(tmp_path: Path) -> None:
    incomplete = tmp_path / "incomplete.jsonl"
    incomplete.write_text('{"step": ')
    away = "is neither a folder nor a run of redis://127.0.0.1:1: "
    for source, words in (
        (tmp_path, f"{tmp_path}/metrics.jsonl or {tmp_path}/trainer/metrics.jsonl"),
        (incomplete, "has no complete step yet"),
        ("nothing", f"'nothing' {away}"),
        ("no/such folder", f"'no/such folder' {away}"),
    ):
        with pytest.raises(InvalidConfigError, match=f"^FOLDER_OR_RUN: .*{words}"):
            read_metrics(str(source), redis_url=AWAY)
