"""One group while it can change: the state of each of its samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import RefillWanted
from turnstream.errors import InvalidTurnError
from turnstream.types import GroupOpened, SealedTrajectory, TrajectoryKey


@dataclass(slots=True)
class GroupMembers:
    """The samples of one group; a sample has one member at most, its first valid attempt.

    Attributes:
        opened_by: id of the event that opened the group.
        members: sample -> its valid, sealed attempt.
        awaiting: attempts that are sealed and wait for their reward.
        ended: samples of which an attempt ended without becoming a member.
        wanted: number -> sample of the refills that were asked for and not granted yet.
        granted: attempts of granted refills that have not ended.
        num_asked: refills asked for.
        num_granted: refills granted.
        last_fired: `num_refills` of the last deadline that fired; -1 before the first.
        seen: attempts with a recorded end.
        is_cut: whether the group ignores unsealed samples, until a refill opens it again.
    """

    opened: GroupOpened
    opened_by: str
    members: dict[int, SealedTrajectory] = field(default_factory=dict[int, SealedTrajectory])
    awaiting: dict[TrajectoryKey, SealedTrajectory] = field(
        default_factory=dict[TrajectoryKey, SealedTrajectory]
    )
    ended: set[int] = field(default_factory=set[int])
    wanted: dict[int, int] = field(default_factory=dict[int, int])
    granted: set[TrajectoryKey] = field(default_factory=set[TrajectoryKey])
    num_asked: int = 0
    num_granted: int = 0
    last_fired: int = -1
    seen: set[TrajectoryKey] = field(default_factory=set[TrajectoryKey])
    is_cut: bool = False

    @property
    def has_enough(self) -> bool:
        """Whether it has as many members as decide it."""
        return len(self.members) >= self.opened.num_needed

    @property
    def least(self) -> int:
        """Members that it takes to compare them; one where one is needed."""
        return min(2, self.opened.num_needed)

    @property
    def ordered(self) -> tuple[SealedTrajectory, ...]:
        """The members in order of their samples."""
        return tuple(member for _, member in sorted(self.members.items()))

    def remove(self, key: TrajectoryKey) -> bool:
        """Remove a dead attempt; return False where it had ended before without a place here."""
        member = self.members.get(key.sample)
        if member is not None and member.key == key:
            del self.members[key.sample]
        elif self.awaiting.pop(key, None) is None and key in self.seen:
            return False
        self.lose(key)
        return True

    @classmethod
    def of_new_group(cls, opened: GroupOpened, opened_by: str, config: BatchingConfig) -> Self:
        """Return a new group, without members."""
        if opened.num_samples > config.max_samples:
            raise InvalidTurnError(
                "num_samples",
                f"group {opened.group_id!r} has {opened.num_samples} samples, above "
                f"max_samples={config.max_samples} of the run",
            )
        return cls(opened, opened_by)

    def is_sample(self, number: int) -> bool:
        """Whether the group was declared with this sample."""
        return 0 <= number < self.opened.num_samples

    def pending(self) -> list[int]:
        """Return the samples without a member that may still get one, in order.

        A sample whose attempt ended counts only where a refill of it was asked for, or an attempt
        of it waits for its reward.
        """
        trying = {*self.wanted.values(), *(key.sample for key in (*self.awaiting, *self.granted))}
        return [
            sample
            for sample in range(self.opened.num_samples)
            if sample not in self.members and (sample not in self.ended or sample in trying)
        ]

    def lose(self, key: TrajectoryKey) -> None:
        """An attempt ended and is no member."""
        self.seen.add(key)
        self.granted.discard(key)
        if key.sample not in self.members:
            self.ended.add(key.sample)

    def end_all(self) -> None:
        """Wait for nothing any more."""
        self.ended.update(self.pending())
        self.awaiting.clear()
        self.wanted.clear()
        self.granted.clear()

    def refill_lost(self, *, max_refills: int) -> list[RefillWanted]:
        """Ask for what is missing for certain: more samples have ended than can be spared."""
        pending = self.pending()
        num_missing = self.opened.num_needed - len(self.members) - len(pending)
        lost = sorted(self.ended - set(self.members) - set(pending))
        return self._ask(lost[: max(0, num_missing)], max_refills)

    def refill_overdue(self, *, max_refills: int) -> list[RefillWanted]:
        """Request missing members after the deadline: ended samples first, then hanging ones."""
        asked_for = {*self.members, *self.wanted.values()}
        overdue = [s for s in range(self.opened.num_samples) if s not in asked_for]
        overdue.sort(key=lambda sample: sample not in self.ended)
        num_missing = self.opened.num_needed - len(self.members) - len(self.wanted)
        return self._ask(overdue[: max(0, num_missing)], max_refills)

    def _ask(self, samples: Iterable[int], max_refills: int) -> list[RefillWanted]:
        asked: list[RefillWanted] = []
        for sample in samples:
            if self.num_asked >= max_refills:
                break
            self.num_asked += 1
            self.wanted[self.num_asked] = sample
            key = TrajectoryKey(self.opened.group_id, sample, self._next_attempt(sample))
            asked.append(
                RefillWanted(key=key, prompt_uid=self.opened.prompt_uid, number=self.num_asked)
            )
        return asked

    def _next_attempt(self, sample: int) -> int:
        known = (key.attempt for key in (*self.seen, *self.granted) if key.sample == sample)
        return 1 + max(known, default=0)
