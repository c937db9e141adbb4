"""Write the tables of metrics into docs/metrics.md, from their declarations.

    .venv/bin/python tools/metrics_page.py

A table stands between two comments: `<!-- metrics of batcher -->` and `<!-- end of metrics -->` for
a service, and `<!-- metrics -->` at the beginning for the steps of the trainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from turnstream_server.telemetry import declarations
from turnstream_server.trainer.reporting.declarations import METRICS, Metric

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


def service_table(service: str) -> str:
    """Return the table of the metrics of a service, in Markdown."""
    titles = ("Prometheus", "Kind", "Unit", "Labels", "Meaning")
    return _table(
        titles,
        (
            (
                f"`{metric.name(service)}`",
                metric.kind,
                metric.unit,
                ", ".join(f"`{label}`" for label in metric.labels),
                metric.sentence.replace("|", r"\|"),
            )
            for metric in declarations.METRICS
            if service in metric.services
        ),
    )


def written(page: str) -> str:
    """Return the page with the tables of today's declarations."""

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
