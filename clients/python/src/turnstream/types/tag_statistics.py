"""Statistics of the tags and metrics of many trajectories: counts, sums and extremes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricStatistics:
    """One metric of the trajectories that have it; float64, summed in their order."""

    num_trajectories: int = 0
    total: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    @property
    def mean(self) -> float:
        """Mean of the values, one per trajectory."""
        return self.total / self.num_trajectories

    def with_value(self, value: float) -> MetricStatistics:
        """Return the statistics with one more trajectory."""
        return MetricStatistics(
            num_trajectories=self.num_trajectories + 1,
            total=self.total + value,
            minimum=min(self.minimum, value),
            maximum=max(self.maximum, value),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueStatistics:
    """The trajectories with one value of a tag.

    Attributes:
        num_rewarded: trajectories that have a reward.
        reward_total: sum of these rewards, float64, in the order of the trajectories.
    """

    num_trajectories: int = 0
    num_rewarded: int = 0
    reward_total: float = 0.0

    @property
    def reward_mean(self) -> float | None:
        """None where no trajectory has a reward."""
        return self.reward_total / self.num_rewarded if self.num_rewarded else None

    def with_reward(self, reward: float | None) -> ValueStatistics:
        """Return the statistics with one more trajectory."""
        return ValueStatistics(
            num_trajectories=self.num_trajectories + 1,
            num_rewarded=self.num_rewarded + (reward is not None),
            reward_total=self.reward_total + (reward or 0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TagStatistics:
    """One tag.

    Attributes:
        values: by value, in order of value.
        other: the trajectories with any other value, if there are too many values.
    """

    values: Mapping[str, ValueStatistics]
    other: ValueStatistics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Tags and metrics of the trajectories of a batch, or of an evaluation.

    Attributes:
        metrics, tags: sorted mappings, keyed by metric and tag.
        num_left_out: metrics and tags of single trajectories that are not counted: there are too
            many names, or a metric is not finite.
    """

    metrics: Mapping[str, MetricStatistics] = field(default_factory=dict[str, MetricStatistics])
    tags: Mapping[str, TagStatistics] = field(default_factory=dict[str, TagStatistics])
    num_left_out: int = 0

    def __bool__(self) -> bool:
        """Whether there are any statistics."""
        return bool(self.metrics or self.tags or self.num_left_out)
