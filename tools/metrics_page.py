"""Write the table of metrics into docs/metrics.md, from their declarations.

    .venv/bin/python tools/metrics_page.py

The table stands between two comments, `<!-- metrics -->` and `<!-- end of metrics -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from turnstream_server.trainer.reporting.declarations import METRICS, Metric

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
BLOCK = re.compile(r"(<!-- metrics -->\n).*?(<!-- end of metrics -->)", re.DOTALL)


def table(metrics: Iterable[Metric]) -> str:
    r"""Return the table in Markdown.

    >>> print(table([Metric("kl", "gauge", "nats", "Estimate of KL(a || b).", group="policy")]))
    | Key | Unit | Meaning | TensorBoard, wandb | Prometheus |
    |---|---|---|---|---|
    | `kl` | nats | Estimate of KL(a \|\| b). | `policy/kl` | `turnstream_trainer_kl` |
    """
    titles = ("Key", "Unit", "Meaning", "TensorBoard, wandb", "Prometheus")
    lines = [titles, ("---",) * len(titles), *map(_cells, metrics)]
    head, ruler, *rows = lines
    return "\n".join([_line(head), f"|{'|'.join(ruler)}|", *map(_line, rows)])


def written(page: str) -> str:
    """Return the page with the table of today's declarations."""
    return BLOCK.sub(lambda found: f"{found[1]}{table(METRICS)}\n{found[2]}", page)


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


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
