from __future__ import annotations

import re

import metrics_page

from turnstream_server.trainer.reporting.declarations import (
    METRICS,
    declared,
    numbers,
    undeclared,
)
from turnstream_server.trainer.reporting.plot import PANELS
from turnstream_server.trainer.reporting.sinks.live_table import COLUMNS


def test_a_changed_declaration_would_change_the_page() -> None:
    page = "<!-- metrics -->\nstale row\n<!-- end of metrics -->\n"

    written = metrics_page.written(page)

    assert "stale row" not in written
    assert metrics_page.written(written) == written


def test_every_name_is_unique_and_valid_in_every_receiver() -> None:
    for names in (
        [metric.name for metric in METRICS],
        [metric.prometheus_name for metric in METRICS],
        [metric.tag for metric in METRICS],
    ):
        assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z_]*", metric.prometheus_name) for metric in METRICS)
    assert all(metric.group and metric.sentence.endswith(".") for metric in METRICS)


def test_seconds_are_declared_with_their_unit() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_s") == (metric.unit in ("s", "tokens/s")), metric


def test_values_that_are_no_numbers_are_skipped() -> None:
    found = list(numbers({"step": 3, "kl": None, "figures": {"tags": {}}, "other": 1.0}))

    assert [(metric.name, value) for metric, value in found] == [("step", 3.0)]


def test_table_and_plot_show_declared_metrics() -> None:
    names = {metric.name for metric in METRICS}

    assert COLUMNS.keys() <= names
    assert {name for panel in PANELS for name, _ in panel.lines} <= names


def test_a_repeated_correction_has_the_declaration_of_the_first() -> None:
    metric = declared("masked_share_tis_2")

    assert metric is not None
    assert metric.prometheus_name == "turnstream_trainer_masked_share_tis_2"
    assert undeclared(["weight_tis", "weight_tis_2", "weight_tiss", "tis_2"]) == [
        "tis_2",
        "weight_tiss",
    ]
