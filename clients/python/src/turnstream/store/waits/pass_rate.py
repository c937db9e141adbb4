"""How many of the groups that were decided lately were dropped. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from turnstream.store.waits.wait_snapshot import WaitSnapshot

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
        """Return that most groups were dropped; empty if not, or if there are too few.

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


def recent_groups(snapshot: WaitSnapshot) -> RecentGroups:
    """Return the groups that were decided since the batch before the newest was planned.

    Two batches, so that there are groups to judge by right after a plan. `at_plans` is empty before
    the first plan, and if an older release planned.
    """
    at_plans = snapshot.at_plans or "0:0:0"
    step, dropped, in_batches = map(int, at_plans.partition(",")[0].split(":"))
    num_dropped = max(0, snapshot.num_opened - snapshot.num_live - dropped)
    num_passed = max(0, snapshot.planned_groups - in_batches) + snapshot.num_ready
    return RecentGroups(
        since_step=step, num_dropped=num_dropped, num_decided=num_dropped + num_passed
    )
