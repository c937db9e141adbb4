from __future__ import annotations

import re

import metrics_page
from metrics_page import SERVICES, shown

from turnstream_server.trainer.reporting.declarations import METRICS as OF_STEPS

ALLOWED_LABELS = {
    *("run", "state", "kind", "part", "outcome", "type", "level", "dependency"),
    *("call", "code", "method", "route", "status"),
}
"""Labels with few values; a group, a trajectory, a model or a key would be a series each."""


def test_every_metric_has_its_own_name_and_a_sentence() -> None:
    metrics = [metric for service in SERVICES for metric in shown(service)]
    names = [metric.name for metric in metrics]
    names += [metric.prometheus_name for metric in OF_STEPS if metric.kind]

    assert len(set(names)) == len(names)
    for metric in metrics:
        assert re.fullmatch(r"turnstream_[a-z]+(_[a-z]+)+", metric.name), metric
        assert re.fullmatch(r"(1 if |[A-Z]).*\.", metric.help), metric
        assert set(metric.labels) <= ALLOWED_LABELS, metric
    prefixes = {metric.name.split("_")[1] for metric in metrics_page.every_metric()}
    assert prefixes == {"batcher", "gateway", "generator", "engine", "sampler"}


def test_the_page_has_a_table_of_each_service() -> None:
    page = metrics_page.PAGE.read_text(encoding="utf-8")

    for service in SERVICES:
        assert f"<!-- metrics of {service} -->\n{metrics_page.service_table(service)}\n" in page
    assert page == metrics_page.written(page), "run tools/metrics_page.py"
