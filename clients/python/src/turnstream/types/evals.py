"""What evaluations of a policy gave: rewards and labels of trajectories that are never trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from turnstream.types.figures import Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Numbers, one by one: how many, where, and how far apart; float64, in their order.

    Attributes:
        mean: 0.0 where there is none.
        squares: sum of the squared distances from the mean.
    """

    num: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Standard deviation over n - 1; 0.0 of less than two numbers."""
        return math.sqrt(self.squares / (self.num - 1)) if self.num > 1 else 0.0

    def with_number(self, number: float) -> Spread:
        """Of one number more."""
        distance = number - self.mean
        mean = self.mean + distance / (self.num + 1)
        return Spread(
            num=self.num + 1, mean=mean, squares=self.squares + distance * (number - mean)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalGroup:
    """One group that was evaluated.

    Attributes:
        version: the oldest that sampled any of it; None if unknown.
        num_trajectories: that were sealed in time.
        num_lost: samples of it that were not.
        reward: of the trajectories that have one.
        best: the highest of these rewards; None where there is none.
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
    """All groups that were evaluated with one version of the weights.

    Attributes:
        version: None of groups of which no version is known.
        num_lost: samples of its groups that were not sealed in time.
        reward: of the trajectories that have one.
        best: of the groups, the highest reward of each: best of n.
        figures: tags and metrics of its trajectories, summed up.
        groups: in order of their end, as far as they are still kept one by one.
    """

    version: int | None
    num_groups: int = 0
    num_trajectories: int = 0
    num_lost: int = 0
    reward: Spread = field(default_factory=Spread)
    best: Spread = field(default_factory=Spread)
    figures: Figures = field(default_factory=Figures)
    groups: tuple[EvalGroup, ...] = ()
