from __future__ import annotations

import re

import metrics_page
from metrics_page import SERVICES, shown

from turnstream_server.trainer.reporting.declarations import (
    METRICS,
    declared,
    numbers,
    undeclared,
)
from turnstream_server.trainer.reporting.plot import PANELS
from turnstream_server.trainer.reporting.sinks import COLUMNS

ALLOWED_LABELS = {
    *("run", "state", "kind", "part", "outcome", "type", "level", "dependency"),
    *("call", "code", "method", "route", "status"),
}
"""Labels with few values; a group, a trajectory, a model or a key would be a series each."""


def test_every_metric_has_its_own_name_and_a_sentence() -> None:
    metrics = [metric for service in SERVICES for metric in shown(service)]
    of_steps = [metric.prometheus_name for metric in METRICS]

    for names in (
        [*(metric.name for metric in metrics), *of_steps],
        [metric.name for metric in METRICS],
        [metric.tag for metric in METRICS],
    ):
        assert len(set(names)) == len(names)
    for metric in metrics:
        assert re.fullmatch(r"turnstream_[a-z]+(_[a-z]+)+", metric.name), metric
        assert re.fullmatch(r"(1 if |[A-Z]).*\.", metric.help), metric
        assert set(metric.labels) <= ALLOWED_LABELS, metric
    prefixes = {metric.name.split("_")[1] for metric in metrics_page.every_metric()}
    assert prefixes == {"batcher", "gateway", "generator", "engine", "sampler"}


def test_metrics_of_steps_have_valid_names_groups_and_units() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z_]*", metric.prometheus_name), metric
        assert metric.group, metric
        assert metric.sentence.endswith("."), metric
        assert metric.name.endswith("_s") == (metric.unit in ("s", "tokens/s")), metric
    names = {metric.name for metric in METRICS}
    assert COLUMNS.keys() <= names
    assert {name for panel in PANELS for name, _ in panel.lines} <= names
    repeated = declared("masked_share_tis_2")
    assert repeated is not None
    assert repeated.prometheus_name == "turnstream_trainer_masked_share_tis_2"
    assert undeclared(["weight_tis_2", "weight_tiss", "tis_2"]) == ["tis_2", "weight_tiss"]
    values = {"step": 3, "kl": None, "figures": {"tags": {}}, "other": 1.0}
    assert [(metric.name, value) for metric, value in numbers(values)] == [("step", 3.0)]


def test_the_page_has_a_table_of_each_service() -> None:
    page = metrics_page.PAGE.read_text(encoding="utf-8")

    for service in SERVICES:
        assert f"<!-- metrics of {service} -->\n{metrics_page.service_table(service)}\n" in page
    assert page == metrics_page.written(page), "run tools/metrics_page.py"
    stale = "<!-- metrics -->\nstale row\n<!-- end of metrics -->\n"
    assert "stale row" not in metrics_page.written(stale)
