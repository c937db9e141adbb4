"""Writes of one request to groups and trajectories: checked, whatever the form of the body."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from turnstream.errors import InvalidTurnError
from turnstream.generator.encode.group_checks import (
    checked_key,
    checked_metrics,
    checked_reward,
    checked_status,
    checked_tags,
)
from turnstream.types import GroupOpened, Status, TrajectoryKey, Turn
from turnstream.types.scalars import flag, named_numbers
from turnstream_server.gateway.rest.bodies import MAX_MEMBERS_OF_GROUPS

_Given = TypeVar("_Given")
_Checked = TypeVar("_Checked")


class Opening(NamedTuple):
    """A group to open, and the members to open with it."""

    group: GroupOpened
    members: list[TrajectoryKey]


def check_num_members(groups: Iterable[tuple[int, Any]]) -> None:
    """Refuse groups with too many members, before any member is made.

    Args:
        groups: `num_samples` and `samples` of each group, as they were sent.
    """
    count = sum(
        len(samples) if hasattr(samples, "__len__") else num_samples
        for num_samples, samples in groups
    )
    if count > MAX_MEMBERS_OF_GROUPS:
        raise InvalidTurnError(
            "samples",
            f"the request opens {count} trajectories, more than {MAX_MEMBERS_OF_GROUPS}: send "
            "fewer groups, or name fewer samples",
        )


def opening_of(group: GroupOpened, *, samples: Iterable[Any] | None) -> Opening:
    """Return a checked opening; without samples, that of all members."""
    members = [
        checked_key(TrajectoryKey(group.group_id, sample), num_samples=group.num_samples)
        for sample in (range(group.num_samples) if samples is None else samples)
    ]
    return Opening(group, list(dict.fromkeys(members)))


class WrittenTurn(NamedTuple):
    """A turn, and its extra columns as they were sent: only the run knows their types."""

    turn: Turn
    extras: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """The end of a finished trajectory. The attributes are those of `TrajectoryWriter.seal`."""

    reward: float | None = None
    reward_components: Mapping[str, float] | None = None
    status: Status | str = Status.COMPLETED
    sampling: Mapping[str, float] | None = None
    tags: Mapping[str, str] | None = None
    metrics: Mapping[str, float] | None = None
    awaits_reward: bool = False

    def checked(self) -> Seal:
        """Return the same seal with checked values; InvalidTurnError names a wrong one."""
        awaits_reward = flag(self.awaits_reward, field="awaits_reward")
        return Seal(
            reward=checked_reward(self.reward, awaits_reward=awaits_reward),
            reward_components=named_numbers(self.reward_components, field="reward_components"),
            status=checked_status(self.status),
            sampling=named_numbers(self.sampling, field="sampling"),
            tags=checked_tags(self.tags),
            metrics=checked_metrics(self.metrics),
            awaits_reward=awaits_reward,
        )

    @property
    def fields(self) -> dict[str, Any]:
        """Return the arguments of `TrajectoryDraft.seal`."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Write:
    """One item of a request: turns of a trajectory, and perhaps its end.

    Attributes:
        item: place in the request, from 0.
        key: the trajectory.
        group: its group as it is to be opened; None if it must be open already.
        first: index of the first turn; None if there is no turn.
        turns: consecutive turns; may be empty.
        seal: its end; None if it stays open, or is abandoned.
        abandon_reason: why it is abandoned; None if it is not.
    """

    item: int
    key: TrajectoryKey
    group: GroupOpened | None = None
    first: int | None = None
    turns: Sequence[WrittenTurn] = ()
    seal: Seal | None = None
    abandon_reason: str | None = None

    @property
    def state(self) -> str:
        """Return the state of the trajectory after this write."""
        if self.abandon_reason is not None:
            return "abandoned"
        if self.seal is None:
            return "open"
        return "awaiting_reward" if self.seal.awaits_reward else "sealed"

    @property
    def can_open(self) -> bool:
        """Whether it may be the first write of its trajectory."""
        return self.group is not None and (self.first == 0 or self._is_failed_start)

    @property
    def _is_failed_start(self) -> bool:
        """Whether it ends a trajectory that failed before its first turn."""
        return self.first is None and self.seal is not None and self.seal.status is Status.ERROR


def checked_items(
    numbered: Iterable[tuple[int, _Given]],
    check: Callable[[int, _Given], _Checked],
    *,
    place: str = "items",
) -> list[_Checked]:
    """Return the results of a check, whose errors name the place and the number of the item."""
    checked: list[_Checked] = []
    for number, given in numbered:
        with named_fields(place, number):
            checked.append(check(number, given))
    return checked


@contextlib.contextmanager
def named_fields(*path: str | int) -> Iterator[None]:
    """Put a path before the field of an InvalidTurnError, as in `items.3.logprobs`."""
    try:
        yield
    except InvalidTurnError as error:
        field = ".".join([*map(str, path), error.field])
        raise InvalidTurnError(field, error.message) from error
