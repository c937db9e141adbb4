"""No config deadlocks: a run progresses at any pass rate above 0, and never too far.

Admission and planning are real. Groups are filtered, abandoned, short, hanging or sampled by old
weights at random, and one in so many passes.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from testkit import ZERO_VARIANCE, config, sealed
from testkit.runs.folds import abandoned, opened
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import (
    Decision,
    GroupCut,
    GroupDropped,
    MemberDropped,
    ReadyGroup,
    RefillWanted,
)
from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.planning.plan_batch import num_groups_to_plan, plan_batch
from turnstream.batching.planning.selection import Selector
from turnstream.store.run.credits import Credit, credit_of
from turnstream.types import (
    BatchDue,
    DeadlineFired,
    Event,
    Leftover,
    RefillGranted,
    RunClosed,
    RunFinished,
    RunReopened,
    TrajectoryAbandoned,
    VersionAnnounced,
)

OUTCOMES = ("equal", "abandoned", "short", "hangs", "old", "passes")
LEFTOVERS: tuple[Leftover, ...] = ("short", "carry", "drop")
NUM_STEPS = 4
MAX_GROUPS = 2_000


class _Run:
    """Store, planner and trainer of a run, and generators whose groups end at random.

    Args:
        policy: config of the run.
        rng: the order of the actions, and the outcomes of the groups.
        pass_every: at least one of so many groups passes.
        num_closings: how often the run is closed, in one way or another, and reopened.
    """

    def __init__(
        self,
        policy: BatchingConfig,
        rng: random.Random,
        *,
        pass_every: int,
        num_closings: int = 0,
    ) -> None:
        self.config, self.rng, self.pass_every = policy, rng, pass_every
        self.fold, self.selector = RunFold(policy), Selector(policy)
        self.groups: dict[str, str] = {}  # name -> state, as in the store
        self.todo: list[Event] = []  # events that generators will post
        self.hanging: list[str] = []
        self.num_events = self.stepped = 0
        self.sizes: list[int] = []  # groups of every planned step
        self.num_closings, self.was_closed = num_closings, False
        self.is_closed = self.is_finished = False
        self.most_untrained = 0  # most groups that were live and not trained when one started
        self.announce()

    @property
    def planned(self) -> int:
        return len(self.sizes)

    @property
    def num_live(self) -> int:
        return len(self.groups) - Counter(self.groups.values())["dropped"]

    @property
    def credit(self) -> Credit:
        """Return the answer of the store."""
        return credit_of(
            self.config,
            stepped=self.stepped,
            num_live=self.num_live,
            num_open=Counter(self.groups.values())["open"],
            is_closed=self.is_closed,
            num_revised=sum(self.sizes) - self.planned * self.config.batch_groups,
        )

    def act(self) -> None:
        """Take one possible action."""
        acts = [
            *([self.open_group] if self.credit.num_groups else []),
            *([self.post_next] if self.todo else []),
            *([self.plan] if self.due else []),
            *([self.step] if self.planned > self.stepped else []),
            *([self.close] if self.num_closings and not self.is_closed and self.is_rare() else []),
            *([self.reopen] if self.is_finished or (self.is_closed and self.is_rare()) else []),
            *([self.finish] if self.fold.is_finished and not self.is_finished else []),
        ]
        if not acts and self.hanging:  # only a deadline is left
            acts = [self.fire]
        if not acts and self.is_closed:
            acts = [self.reopen]
        assert acts, (
            f"no action is possible: {self.credit.sentence}, {self.fold.num_ready} are ready"
        )
        self.rng.choice(acts)()

    # generators

    def open_group(self) -> None:
        number = len(self.groups)
        group_id = f"g{number}"
        self.groups[group_id] = "open"
        self.post(opened(group_id=group_id))
        self.most_untrained = max(
            self.most_untrained, self.num_live - sum(self.sizes[: self.stepped])
        )
        passes = number % self.pass_every == 0
        self.write(group_id, "passes" if passes else self.rng.choice(OUTCOMES))

    def write(self, group_id: str, outcome: str) -> None:
        version = max(0, self.stepped - 3) if outcome == "old" else self.stepped
        seals: list[Event] = [
            sealed(group_id, sample=0, reward=0.0, version=version),
            sealed(group_id, sample=1, reward=0.0 if outcome == "equal" else 1.0, version=version),
        ]
        lost: list[Event] = [abandoned(sample, group_id=group_id) for sample in (0, 1)]
        events = {"abandoned": lost, "hangs": seals[:1], "short": [seals[0], lost[1]]}
        self.todo += events.get(outcome, seals)
        if outcome == "hangs":
            self.hanging.append(group_id)

    def post_next(self) -> None:
        self.post(self.todo.pop(self.rng.randrange(len(self.todo))))

    def fire(self) -> None:
        group_id = self.hanging.pop(0)
        self.post(DeadlineFired(group_id=group_id))
        if self.groups[group_id] == "open":  # for a refill, which hangs as well
            self.post(DeadlineFired(group_id=group_id, num_refills=1))

    # the operator

    def is_rare(self) -> bool:
        return self.rng.random() < 0.1

    def close(self) -> None:
        self.num_closings -= 1
        self.was_closed = self.is_closed = True
        self.post(RunClosed(reason="", leftover=self.rng.choice(LEFTOVERS)))

    def reopen(self) -> None:
        self.is_closed = self.is_finished = False
        self.post(RunReopened())

    # the store and the planner

    def finish(self) -> None:
        self.is_finished = True
        self.post(RunFinished(step=self.planned))

    def post(self, event: Event) -> None:
        self.num_events += 1
        event_id = f"{self.num_events}-0"
        decisions = self.fold.apply(event_id, event)
        decisions += self.selector.apply(event_id, event, self.fold)
        for decision in [each for each in decisions if self.fold.still_holds(each)]:
            self.carry_out(decision)

    def carry_out(self, decision: Decision) -> None:
        match decision:
            case GroupDropped(group_id=group_id):
                self.groups[group_id] = "dropped"
            case GroupCut(group_id=group_id):
                self.groups[group_id] = "decided"
            case RefillWanted(key=key, number=number):
                self.groups[key.group_id] = "open"
                self.post(RefillGranted(key=key, number=number))
                self.todo.append(TrajectoryAbandoned(key=key, reason="lost again"))
            case MemberDropped():
                pass

    @property
    def due(self) -> tuple[ReadyGroup, ...]:
        """The groups of the next batch, as the leader finds them."""
        if self.planned >= self.stepped + 1 + self.config.max_planned_ahead:
            return ()
        if self.selector.choice is not None:
            return self.selector.choice.groups
        number = num_groups_to_plan(self.fold.num_ready, self.config, is_final=self.fold.is_final)
        return self.fold.ready[:number]

    def plan(self) -> None:
        step = self.planned + 1
        if self.config.chooses_by_event and self.selector.choice is None:
            self.post(BatchDue(step=step))
            return
        groups, choice = self.due, self.selector.choice
        manifest = plan_batch(
            groups,
            config=self.config,
            run="run",
            step=step,
            lineage="main",
            previous_hash="",
            first_row_id=0,
            config_revision=1,
            masked_versions=choice.masked_versions if choice else (),
        )
        assert len(manifest.groups) == self.config.batch_groups or self.was_closed
        self.fold.take(groups)
        self.selector.pass_step(step)
        self.groups |= {group.group_id: "planned" for group in groups}
        self.sizes.append(len(groups))

    # the trainer

    def step(self) -> None:
        self.stepped += 1
        self.announce()

    def announce(self) -> None:
        version = VersionAnnounced(version=self.stepped, step=self.stepped, lineage="main")
        self.post(version)


@st.composite
def policies(draw: st.DrawFn) -> BatchingConfig:
    """Runs that filter, and drop groups that are missing members or too old."""
    batch_groups = draw(st.integers(1, 3))
    max_staleness = draw(st.integers(0, 3))
    surplus = draw(st.sampled_from(["drop", "keep"]))
    least_open = 1 if surplus == "drop" else batch_groups
    deadline_policy = draw(st.sampled_from(["drop", "train_short", "refill"]))
    fields: dict[str, Any] = {
        "max_staleness": max_staleness,
        "max_planned_ahead": draw(st.integers(0, max_staleness)),
        "max_open_groups": draw(st.just(0) | st.integers(least_open, 5)),
        "max_age_policy": draw(
            st.sampled_from(["drop", "mask", "keep"] if max_staleness else ["keep"])
        ),
        "selection": draw(st.sampled_from(["in_order", "oldest_weights", "ready_first"])),
        "surplus": surplus,
        "deadline_policy": deadline_policy,
        "max_refills": 1 if deadline_policy == "refill" else 0,
        "group_deadline_s": 1.0,
        "group_filters": ZERO_VARIANCE,
    }
    return replace(config(batch_groups), **fields)


@given(
    policy=policies(),
    seed=st.integers(0, 2**32),
    pass_every=st.integers(1, 40),
    num_closings=st.integers(0, 6),
)
def test_run_progresses_within_max_staleness_at_any_pass_rate(
    policy: BatchingConfig, seed: int, pass_every: int, num_closings: int
) -> None:
    # A short step of a closed run counted as a whole batch: after it was reopened, groups of as
    # many steps more could begin, and were trained by weights that were older than allowed.
    run = _Run(policy, random.Random(seed), pass_every=pass_every, num_closings=num_closings)

    while run.stepped < NUM_STEPS + num_closings and len(run.groups) < MAX_GROUPS:
        run.act()

    assert run.stepped == NUM_STEPS + num_closings
    assert run.most_untrained <= (policy.max_staleness + 1) * policy.batch_groups
