"""Write the tables of metrics into docs/metrics.md, from the instruments and families in the code.

    .venv/bin/python tools/metrics_page.py

A table stands between two comments: `<!-- metrics of batcher -->` and `<!-- end of metrics -->` for
a service, and `<!-- metrics -->` at the beginning for the steps of the trainer.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client.core import Metric as Family
from prometheus_client.metrics import MetricWrapperBase

import turnstream_server
from turnstream.generator import PublisherStatistics
from turnstream_server.generators.metrics import PublisherMetrics
from turnstream_server.telemetry.instruments import errors, log_records
from turnstream_server.telemetry.readiness import Readiness
from turnstream_server.trainer.reporting.declarations import METRICS, Metric

SOURCES = Path(turnstream_server.__file__).parent
SERVICES = ("batcher", "gateway", "trainer", "generator", "replayer", "engine", "sampler")
PAGE = Path(__file__).parents[1] / "docs/metrics.md"
BLOCK = re.compile(r"(<!-- metrics(?: of (\w+))? -->\n).*?(<!-- end of metrics -->)", re.DOTALL)


def table(metrics: Iterable[Metric]) -> str:
    r"""Return the table of metrics of a step, in Markdown.

    >>> print(table([Metric("kl", "gauge", "nats", "Estimate of KL(a || b).", group="policy")]))
    | Key | Unit | Meaning | TensorBoard, wandb | Prometheus |
    |---|---|---|---|---|
    | `kl` | nats | Estimate of KL(a \|\| b). | `policy/kl` | `turnstream_trainer_kl` |
    """
    titles = ("Key", "Unit", "Meaning", "TensorBoard, wandb", "Prometheus")
    return _table(titles, map(_cells, metrics))


class Shown(NamedTuple):
    """A metric as it is in the page."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def service_table(service: str) -> str:
    """Return the table of the metrics of a service, in Markdown."""
    titles = ("Prometheus", "Kind", "Labels", "Meaning")
    return _table(
        titles,
        (
            (
                f"`{metric.name}`",
                metric.kind,
                ", ".join(f"`{label}`" for label in metric.labels),
                metric.help.replace("|", r"\|"),
            )
            for metric in shown(service)
        ),
    )


def shown(service: str) -> list[Shown]:
    """Return the metrics of a service, sorted by name."""
    metrics = [*Readiness(service).collect(), log_records(service), errors(service)]
    if service in ("generator", "replayer"):
        metrics += PublisherMetrics(service, PublisherStatistics).collect()
    found = [*map(_shown, metrics), *every_metric()]
    return sorted(each for each in found if each.name.startswith(f"turnstream_{service}_"))


@functools.cache
def every_metric() -> tuple[Shown, ...]:
    """Return the instruments and families at the top of every module that has some."""
    return tuple(map(_shown, _declared()))


def _declared() -> Iterator[MetricWrapperBase | Family]:
    for path in sorted(SOURCES.rglob("*.py")):
        if "turnstream_server.telemetry.instruments import" in path.read_text(encoding="utf-8"):
            name = ".".join(("turnstream_server", *path.relative_to(SOURCES).with_suffix("").parts))
            for each in vars(importlib.import_module(name)).values():
                if isinstance(each, MetricWrapperBase | Family):
                    yield each


def _shown(metric: MetricWrapperBase | Family) -> Shown:
    family = metric if isinstance(metric, Family) else next(iter(metric.describe()))
    name = f"{family.name}{'_total' if family.type == 'counter' else ''}"
    return Shown(name, family.type, tuple(getattr(metric, "_labelnames", ())), family.documentation)


def written(page: str) -> str:
    """Return the page with the tables of the code as it is."""

    def block(found: re.Match[str]) -> str:
        content = service_table(found[2]) if found[2] else table(METRICS)
        return f"{found[1]}{content}\n{found[3]}"

    return BLOCK.sub(block, page)


def _cells(metric: Metric) -> tuple[str, ...]:
    meaning = metric.sentence.replace("|", r"\|") + (" May be null." if metric.is_optional else "")
    if not metric.kind:
        return (f"`{metric.name}`", metric.unit, meaning, "", "")
    return (
        f"`{metric.name}`",
        metric.unit,
        meaning,
        f"`{metric.tag}`",
        f"`{metric.prometheus_name}`",
    )


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    ruler = f"|{'|'.join(['---'] * len(titles))}|"
    return "\n".join([_line(titles), ruler, *map(_line, rows)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
