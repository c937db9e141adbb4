"""The groups of a batch, where the choice depends on more than the order of their completion.

The choice is made at an event, BatchDue, from the groups and versions before it::

    BatchDue(step) ──> groups whose tokens are too old ──> expired
                       the first of the others, in the run's order ──> chosen for this step

A choice stands until its plan is written. A member that dies or joins voids it. With too few groups
there is no choice, but those that are too old expire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import Decision, GroupDropped, ReadyGroup
from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.fold.staleness import VersionSteps, is_wholly_of, tokens_of
from turnstream.batching.planning.plan_batch import event_order, num_groups_to_plan
from turnstream.batching.scoring.filters import is_masked
from turnstream.types import (
    BatchDue,
    Event,
    RewardPosted,
    RolledBack,
    SealedTrajectory,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
    VersionAnnounced,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The groups of a batch in the run's order, chosen at a BatchDue event."""

    chosen_at: str
    groups: tuple[ReadyGroup, ...]
    masked_versions: tuple[int, ...]


class Selector:
    """Chooses the groups of one batch after another. Applying an event again changes nothing."""

    def __init__(self, config: BatchingConfig) -> None:
        self.choice: Choice | None = None
        self.versions = VersionSteps()
        self._config = config
        self._last_step = 0

    def apply(self, event_id: str, event: Event, fold: RunFold) -> list[Decision]:
        """Apply the next event, after `fold` has; return the groups that expire with it.

        They are taken from the fold, and their members that wait for a reward are surplus.
        """
        match event:
            case VersionAnnounced():
                self.versions.announce(event)
            case RolledBack(step=step):
                self.versions.roll_back(step)
            case TrajectoryDied() | SealedTrajectory() | RewardPosted():
                self._reconsider(event.key, fold)
            case BatchDue() if self.choice is None and event.step > self._last_step:
                return self._choose(event_id, event.step, fold)
            case _:
                pass
        return []

    def revise(self, config: BatchingConfig) -> None:
        """Choose by another configuration; a choice that was not planned is made again."""
        self.choice = None
        self._config = config

    def pass_step(self, step: int) -> None:
        """The plan of this step is written."""
        self._last_step = step
        self.choice = None

    def num_over_age(self, groups: Sequence[ReadyGroup], *, step: int) -> int:
        """Return how many of these groups have tokens that are older than the run allows."""
        old = self._old_versions(groups, step=step)
        return sum(_has_old_tokens(group, old, self._config) for group in groups)

    def _old_versions(self, groups: Sequence[ReadyGroup], *, step: int) -> frozenset[int]:
        """Return the versions that sampled these groups and are older than the run allows."""
        max_age = self._config.max_staleness
        return self.versions.older_than(max_age, train_step=step, among=_sampled(groups))

    def _reconsider(self, changed: TrajectoryKey, fold: RunFold) -> None:
        chosen = self.choice.groups if self.choice is not None else ()
        own = next((group for group in chosen if group.group_id == changed.group_id), None)
        if own is not None and own not in fold.ready:
            self.choice = None

    def _choose(self, event_id: str, step: int, fold: RunFold) -> list[Decision]:
        config = self._config
        old = self._old_versions(fold.ready, step=step)
        expired = [group for group in fold.ready if _has_expired(group, old, config)]
        left_over = fold.take(expired)
        num_groups = num_groups_to_plan(fold.num_ready, config, is_final=fold.is_final)
        if num_groups:
            groups = tuple(sorted(fold.ready, key=_ORDER[config.selection])[:num_groups])
            masked = _sampled(groups) & old if config.max_age_policy == "mask" else set[int]()
            self.choice = Choice(
                chosen_at=event_id,
                groups=groups,
                masked_versions=tuple(sorted(masked)),
            )
        reason = f"tokens more than {config.max_staleness} steps old when step {step} was planned"
        drops = [
            GroupDropped(
                group_id=group.group_id,
                state=TrajectoryState.EXPIRED,
                reason=reason,
                keys=tuple(member.key for member in group.members),
            )
            for group in expired
        ]
        return [*left_over, *drops]


def _has_expired(group: ReadyGroup, old: frozenset[int], config: BatchingConfig) -> bool:
    """Whether the group has old tokens; where these are masked, whether it has no others."""
    if config.max_age_policy == "keep" or not _has_old_tokens(group, old, config):
        return False
    return config.max_age_policy == "drop" or all(
        is_masked(member, config) or _is_all_old(member, old) for member in group.members
    )


def _has_old_tokens(group: ReadyGroup, old: frozenset[int], config: BatchingConfig) -> bool:
    """Whether a token that would be trained is of one of these versions."""
    return any(
        member.oldest_version in old and not is_masked(member, config) for member in group.members
    )


def _is_all_old(member: SealedTrajectory, old: frozenset[int]) -> bool:
    num_trained = sum([turn.num_trained_tokens for turn in member.turns])
    return is_wholly_of(member, old) or sum(tokens_of(member, old)) == num_trained


def _oldest_version(group: ReadyGroup) -> tuple[bool, int]:
    """Return a key that sorts groups without a known version last."""
    known = [m.oldest_version for m in group.members if m.oldest_version is not None]
    return not known, min(known, default=0)


_ORDER: dict[str, Callable[[ReadyGroup], tuple[int, ...]]] = {
    "in_order": lambda group: event_order(group.opened_by),
    "oldest_weights": _oldest_version,
    "ready_first": lambda _: (),
}
"""Sort keys of groups; equal ones stay in order of completion."""


def _sampled(groups: Sequence[ReadyGroup]) -> set[int]:
    """Return every version that sampled a trained token of these groups."""
    versions: set[int] = set()
    for group in groups:
        for member in group.members:
            named = {version for own in member.turn_versions for version, _ in own}
            named |= {member.oldest_version, member.newest_version}
            versions |= {version for version in named if version is not None}
    return versions
