"""Results of evaluations: rewards and labels of trajectories that are never trained."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from turnstream.types.tag_statistics import Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Count, mean and variance of numbers, in their order; float64.

    Attributes:
        mean: 0.0 where there is none.
        squares: sum of the squared distances from the mean.
    """

    num: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Standard deviation over n - 1; 0.0 for less than two numbers."""
        return math.sqrt(self.squares / (self.num - 1)) if self.num > 1 else 0.0

    def with_numbers(self, numbers: Iterable[float]) -> Spread:
        """Return the spread with more numbers."""
        num, mean, squares = self.num, self.mean, self.squares
        for number in numbers:
            num += 1
            distance = number - mean
            mean += distance / num
            squares += distance * (number - mean)
        return Spread(num=num, mean=mean, squares=squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalGroup:
    """One evaluated group.

    Attributes:
        version: oldest version that sampled a part of it; None if unknown.
        num_trajectories: trajectories sealed in time.
        num_lost: other samples.
        reward: rewards of the trajectories that have one.
        best: the highest of these rewards; None without any.
    """

    group_id: str
    prompt_uid: str
    version: int | None
    num_trajectories: int
    num_lost: int
    reward: Spread
    best: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """All evaluated groups of one version of the weights.

    Attributes:
        version: None for groups without a known version.
        num_lost: samples of its groups that were not sealed in time.
        reward: rewards of the trajectories that have one.
        best: the highest reward of each group: best of n.
        figures: sums of the tags and metrics of its trajectories.
        groups: retained single groups, in order of their end.
    """

    version: int | None
    num_groups: int = 0
    num_trajectories: int = 0
    num_lost: int = 0
    reward: Spread = field(default_factory=Spread)
    best: Spread = field(default_factory=Spread)
    figures: Figures = field(default_factory=Figures)
    groups: tuple[EvalGroup, ...] = ()
