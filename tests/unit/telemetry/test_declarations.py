from __future__ import annotations

import re
from pathlib import Path

import metrics_page

import turnstream_server
from turnstream_server.telemetry import declarations
from turnstream_server.telemetry.declarations import METRICS, SERVICES, Metric
from turnstream_server.trainer.reporting.declarations import METRICS as OF_STEPS

SOURCES = Path(turnstream_server.__file__).parent
ALLOWED_LABELS = {
    *("run", "state", "kind", "part", "outcome", "type", "level", "dependency"),
    *("call", "code", "method", "route", "status"),
}
"""Labels with few values; a group, a trajectory, a model or a key would be a series each."""


def test_every_name_is_unique_and_ends_with_its_unit() -> None:
    names = [metric.name(service) for metric in METRICS for service in metric.services]
    names += [metric.prometheus_name for metric in OF_STEPS if metric.kind]

    assert len(set(names)) == len(names)
    for metric in METRICS:
        for service in metric.services:
            assert service in SERVICES
            assert re.fullmatch(r"turnstream_[a-z]+(_[a-z]+)+", metric.name(service)), metric
        assert metric.what.endswith(metric.unit), metric
        assert re.fullmatch(r"(1 if |[A-Z]).*\.", metric.sentence), metric


def test_labels_have_few_values() -> None:
    assert {label for metric in METRICS for label in metric.labels} <= ALLOWED_LABELS


def test_every_declared_metric_has_a_value_somewhere() -> None:
    constants = {name for name, each in vars(declarations).items() if isinstance(each, Metric)}
    texts = [
        path.read_text(encoding="utf-8")
        for path in SOURCES.rglob("*.py")
        if path.name != "declarations.py"
    ]

    unused = {
        name for name in constants if not any(re.search(rf"\b{name}\b", text) for text in texts)
    }

    assert len(constants) == len(METRICS)
    assert unused == set()


def test_the_page_has_a_table_of_each_service() -> None:
    page = metrics_page.PAGE.read_text(encoding="utf-8")

    for service in SERVICES:
        assert f"<!-- metrics of {service} -->\n{metrics_page.service_table(service)}\n" in page
    assert page == metrics_page.written(page), "run tools/metrics_page.py"
