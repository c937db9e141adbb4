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
            if abs(value) <= MAX_METRIC and _has_room(metrics, name, most=MAX_METRICS):
                metrics[name] = _with_metric(metrics.get(name), value)
            else:
                num_left_out += 1
        for name, text in sealed.tags.items():
            if _has_room(tags, name, most=MAX_TAGS):
                tags[name] = _with_tag(tags.get(name), text, reward)
            else:
                num_left_out += 1
    return Figures(metrics=_sorted(metrics), tags=_sorted(tags), num_left_out=num_left_out)


def _has_room(known: Mapping[str, object], name: str, *, most: int) -> bool:
    return name in known or len(known) < most


def _with_metric(known: MetricStatistics | None, value: float) -> MetricStatistics:
    if known is None:
        return MetricStatistics(num_trajectories=1, total=value, minimum=value, maximum=value)
    return MetricStatistics(
        num_trajectories=known.num_trajectories + 1,
        total=known.total + value,
        minimum=min(known.minimum, value),
        maximum=max(known.maximum, value),
    )


def _with_tag(known: TagStatistics | None, text: str, reward: float | None) -> TagStatistics:
    if known is None:
        return TagStatistics(values={text: _with_reward(None, reward)})
    if not _has_room(known.values, text, most=MAX_VALUES):
        return TagStatistics(values=known.values, other=_with_reward(known.other, reward))
    values = {**known.values, text: _with_reward(known.values.get(text), reward)}
    return TagStatistics(values=_sorted(values), other=known.other)


def _with_reward(known: ValueStatistics | None, reward: float | None) -> ValueStatistics:
    known = known or ValueStatistics(num_trajectories=0, num_rewarded=0, reward_total=0.0)
    return ValueStatistics(
        num_trajectories=known.num_trajectories + 1,
        num_rewarded=known.num_rewarded + (reward is not None),
        reward_total=known.reward_total + (reward or 0.0),
    )


def _sorted(values: Mapping[str, _Value]) -> dict[str, _Value]:
    return dict(sorted(values.items()))
