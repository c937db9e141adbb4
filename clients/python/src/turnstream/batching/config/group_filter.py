"""Group filters: rules of a run by which complete groups are not trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from turnstream.batching.config.values import checked_objects
from turnstream.errors import InvalidConfigError

FilterKind = Literal["zero_variance", "mean_range"]

_FIELD = "group_filters"
_LARGEST = 1e30  # as the largest reward


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """A rule by which complete groups are filtered: they are not trained.

    It judges one number of each member that is compared. Without `metric` and `component`, the
    number is the raw reward: the reward by `reward_source`, before any penalty.

    >>> GroupFilter(kind="mean_range", metric="accuracy", low=0.2, high=0.8).judged
    "metric 'accuracy'"

    Attributes:
        kind: "zero_variance" filters a group whose values are all equal (DAPO, arXiv:2503.14476).
            "mean_range" filters a group whose mean is below `low` or above `high`.
        metric: name of a number in the `metrics` of the seals; empty for none.
        component: name of a reward component; empty for none.
        low, high: smallest and largest mean of a kept group; None means no limit.

    Raises:
        InvalidConfigError: names the setting `group_filters` and the wrong value.
    """

    kind: FilterKind
    metric: str = ""
    component: str = ""
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        """Check every field and their combinations; limits are stored as floats."""
        if self.kind not in get_args(FilterKind):
            self._refuse(f"kind={self.kind!r} is not one of {', '.join(get_args(FilterKind))}")
        for name in ("metric", "component"):
            if not isinstance(getattr(self, name), str):
                self._refuse(f"{name}={getattr(self, name)!r} is no name")
        if self.metric and self.component:
            self._refuse(
                f"metric={self.metric!r} and component={self.component!r} are two numbers; "
                "use a filter for each"
            )
        for name in ("low", "high"):
            object.__setattr__(self, name, self._checked_limit(name))
        self._check_limits()

    @property
    def judged(self) -> str:
        """The number that is judged, in words."""
        if self.metric:
            return f"metric {self.metric!r}"
        return f"component {self.component!r}" if self.component else "the reward"

    def _checked_limit(self, name: str) -> float | None:
        value: object = getattr(self, name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(cast("float", value)) <= _LARGEST:
            self._refuse(f"{name}={value!r} is no number of at most {_LARGEST:g}")
        return float(cast("float", value))

    def _check_limits(self) -> None:
        has_limit = self.low is not None or self.high is not None
        if self.kind == "zero_variance" and has_limit:
            self._refuse(f"low={self.low} and high={self.high} are for kind='mean_range' alone")
        if self.kind == "mean_range" and not has_limit:
            self._refuse("kind='mean_range' without low and high filters no group")
        if self.low is not None and self.high is not None and self.low > self.high:
            self._refuse(f"low={self.low:g} is above high={self.high:g}: no group would be kept")

    def _refuse(self, message: str) -> None:
        raise InvalidConfigError(_FIELD, message)


def checked_filters(given: object) -> tuple[GroupFilter, ...]:
    """Return filters in their order, also from the objects of stored JSON."""
    filters = checked_objects(given, GroupFilter, field=_FIELD, noun="filter")
    for each in filters:
        if filters.count(each) > 1:
            raise InvalidConfigError(_FIELD, f"{each!r} comes twice")
    return tuple(filters)
