"""Tags and metrics of trajectories, summed up: a function of the trajectories and their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from turnstream.types import (
    Figures,
    MetricStatistics,
    SealedTrajectory,
    TagStatistics,
    ValueStatistics,
)

MAX_METRICS: Final = 256
"""Metrics with a sum of their own, the first that occur: every rank reads a manifest."""

MAX_TAGS: Final = 64
"""Tags with sums of their own, the first that occur."""

MAX_VALUES: Final = 32
"""Values of one tag with a sum of their own, the first that occur; the rest adds up in `other`."""

MAX_METRIC: Final = 1e30
"""Beyond it sums of metrics could leave float64. The SDK lets none through."""

_Value = TypeVar("_Value")


def sum_up(
    trajectories: Iterable[tuple[SealedTrajectory, float | None]], *, onto: Figures | None = None
) -> Figures:
    """Return the figures of these trajectories, each with its reward, added to those of `onto`.

    Metrics 2.0 and 4.0 named "turns", and tags "env" of "maze" with rewards 1.0 and 0.0::

        metrics  turns: 2 trajectories, total 6.0 (mean 3.0), 2.0 to 4.0
        tags     env: maze: 2 trajectories, reward_total 1.0 (reward_mean 0.5)
    """
    known = onto or Figures()
    metrics, tags = dict(known.metrics), dict(known.tags)
    num_left_out = known.num_left_out
    for sealed, reward in trajectories:
        for name, value in sealed.metrics.items():
            if abs(value) <= MAX_METRIC and _has_place(metrics, name, most=MAX_METRICS):
                metrics[name] = metrics.get(name, MetricStatistics()).with_value(value)
            else:
                num_left_out += 1
        for name, text in sealed.tags.items():
            if _has_place(tags, name, most=MAX_TAGS):
                tags[name] = _with_tag(tags.get(name, TagStatistics(values={})), text, reward)
            else:
                num_left_out += 1
    return Figures(metrics=_sorted(metrics), tags=_sorted(tags), num_left_out=num_left_out)


def _has_place(known: Mapping[str, object], name: str, *, most: int) -> bool:
    return name in known or len(known) < most


def _with_tag(known: TagStatistics, text: str, reward: float | None) -> TagStatistics:
    if not _has_place(known.values, text, most=MAX_VALUES):
        other = (known.other or ValueStatistics()).with_reward(reward)
        return TagStatistics(values=known.values, other=other)
    own = known.values.get(text, ValueStatistics()).with_reward(reward)
    return TagStatistics(values=_sorted({**known.values, text: own}), other=known.other)


def _sorted(values: Mapping[str, _Value]) -> dict[str, _Value]:
    return dict(sorted(values.items()))
