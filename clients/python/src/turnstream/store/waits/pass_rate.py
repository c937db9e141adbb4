"""How many of the groups that were decided lately were dropped. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LOW_PASS_RATE: Final = 0.5
"""Share of the decided groups below which most sampling is wasted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentGroups:
    """The groups that were decided since the batch before the newest was planned.

    Attributes:
        since_step: that batch; 0: since the run began.
        num_dropped: of them.
        num_decided: all of them: dropped, in a later batch, or ready for one.
    """

    since_step: int
    num_dropped: int
    num_decided: int

    def why_low(self, *, least: int) -> str:
        """Return that most groups were dropped, in words; empty if not, or if there are too few.

        >>> recent = RecentGroups(since_step=3, num_dropped=12, num_decided=20)
        >>> recent.why_low(least=8)
        '12 of the 20 groups that were decided since step 3 was planned were dropped'
        """
        passed = self.num_decided - self.num_dropped
        if self.num_decided < least or passed >= LOW_PASS_RATE * self.num_decided:
            return ""
        since = f"that were decided since step {self.since_step} was planned"
        if not self.since_step:
            since = "that were decided"
        return f"{self.num_dropped} of the {self.num_decided} groups {since} were dropped"


def recent_groups(
    at_plans: str, *, num_dropped: int, num_in_batches: int, num_ready: int
) -> RecentGroups:
    """Return the groups that were decided since the batch before the newest was planned.

    Two batches, so that there are groups to judge by right after a plan.

    >>> recent_groups("3:10:12,4:15:16", num_dropped=22, num_in_batches=16, num_ready=4)
    RecentGroups(since_step=3, num_dropped=12, num_decided=20)

    Args:
        at_plans: see store.keys; empty before the first plan, and if an older release planned.
        num_dropped: groups of the run that were dropped.
        num_in_batches: groups that are in a batch.
        num_ready: groups that are decided, and in no batch.
    """
    step, dropped, in_batches = map(int, (at_plans or "0:0:0").partition(",")[0].split(":"))
    num_since = max(0, num_dropped - dropped)
    num_passed = max(0, num_in_batches - in_batches) + num_ready
    return RecentGroups(since_step=step, num_dropped=num_since, num_decided=num_since + num_passed)
