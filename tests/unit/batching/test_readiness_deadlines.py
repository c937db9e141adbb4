"""Groups that finish: first n of m, deadlines, refills, late rewards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from testkit import config, sealed
from testkit.runs.folds import (
    DEADLINE,
    abandoned,
    apply,
    awaiting,
    died,
    fold,
    granted,
    key,
    missed,
    opened,
    posted,
    samples,
    seals,
)
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import GroupCut, GroupDropped, MemberDropped, RefillWanted
from turnstream.batching.fold.readiness import RunFold
from turnstream.types import Event, TrajectoryState

CONFIG = config()
SHORT = replace(CONFIG, deadline_policy="train_short", group_deadline_s=60)
REFILL = replace(CONFIG, deadline_policy="refill", max_refills=2)
KEEP = replace(CONFIG, surplus="keep")
INCOMPLETE, SURPLUS = TrajectoryState.INCOMPLETE, TrajectoryState.SURPLUS


def wanted(number: int, sample: int, attempt: int = 1) -> RefillWanted:
    return RefillWanted(key=key(sample, attempt), prompt_uid="uid of g0", number=number)


def test_first_needed_members_decide_the_group_and_cut_the_others() -> None:
    folded, decided = fold([opened(4, 2), *seals(3, 1, 0)])

    assert samples(folded) == [[1, 3]]
    assert folded.ready[0].completed_by == "2-0"
    assert decided == [
        GroupCut(group_id="g0", reason="its group was decided by 2 of 4"),
        MemberDropped(
            key=key(0), state=SURPLUS, reason="its group was decided before it was sealed"
        ),
    ]


def test_kept_surplus_joins_until_the_group_is_taken() -> None:
    folded, decided = fold([opened(4, 2), *seals(3, 1, 0)], KEEP)
    (joined,) = folded.ready

    assert (samples(folded), joined.completed_by, decided) == ([[0, 1, 3]], "3-0", [])
    assert folded.take([joined]) == []
    (drop,) = apply(folded, sealed(sample=2), first=9)
    assert (drop.key, drop.state) == (key(2), SURPLUS)


def test_kept_group_is_planned_without_members_that_await_rewards() -> None:
    events = [opened(3, 2), *seals(0, 1), awaiting(2)]
    folded, _ = fold(events, KEEP)
    missing, (missed_one,) = fold([*events, missed(2)], KEEP)

    (drop,) = folded.take(folded.ready)

    assert isinstance(drop, MemberDropped)
    assert (drop.key, drop.state, missed_one.key) == (key(2), SURPLUS, key(2))
    assert apply(folded, posted(2), first=9) == []
    assert (samples(missing), missing.ready[0].completed_by) == ([[0, 1]], "2-0")


def test_group_is_dropped_at_its_deadline_with_the_missing_samples() -> None:
    folded, (drop,) = fold([opened(4), *seals(0, 2), DEADLINE])

    assert folded.num_open_groups == 0
    assert drop == GroupDropped(
        group_id="g0",
        state=INCOMPLETE,
        reason="its deadline passed: 2 of 4 members, none of sample 1, 3",
        keys=(key(0), key(2)),
    )


def test_short_group_is_trained_at_its_deadline_or_when_all_others_ended() -> None:
    folded, decided = fold([opened(4), *seals(0, 2), DEADLINE], SHORT)
    ended, undecided = fold([opened(4, 3), *seals(0, 1), abandoned(2), abandoned(3)])

    assert (samples(folded), samples(ended)) == ([[0, 2]], [[0, 1]])
    assert decided == [GroupCut(group_id="g0", reason="its group was decided by 2 of 4")]
    assert undecided == []


@pytest.mark.parametrize("of", [CONFIG, SHORT, REFILL])
def test_deadline_of_a_decided_group_changes_nothing(of: BatchingConfig) -> None:
    folded, decided = fold([opened(), *seals(0, 1), DEADLINE], of)

    assert (samples(folded), decided) == ([[0, 1]], [])


@pytest.mark.parametrize(
    ("events", "asked"),
    [
        ([opened(), *seals(0), abandoned(1)], [wanted(1, sample=1)]),
        ([opened(), *seals(0), died(0)], [wanted(1, sample=0)]),
        ([opened(4, 2), abandoned(0), abandoned(1)], []),
        ([opened(4, 2), abandoned(0), abandoned(1), abandoned(2)], [wanted(1, sample=0)]),
        (
            [opened(4, 3), *seals(0), abandoned(3), DEADLINE],
            [wanted(1, sample=3), wanted(2, sample=1)],
        ),
        (
            [opened(3), *seals(0), abandoned(1), DEADLINE],
            [wanted(1, sample=1), wanted(2, sample=2)],
        ),
        (
            [opened(), *seals(0), DEADLINE, granted(1, sample=1), DEADLINE],
            [wanted(1, sample=1)],
        ),
    ],
    ids=["abandoned", "dead", "spared", "needed", "deadline", "not twice", "repeated deadline"],
)
def test_missing_samples_are_asked_for_once(events: list[Event], asked: list[RefillWanted]) -> None:
    folded, decided = fold(events, REFILL)

    assert decided == asked
    assert (folded.num_ready, folded.num_open_groups) == (0, 1)


def test_unusable_sample_and_dead_member_of_a_ready_group_are_refilled() -> None:
    _, (drop, again) = fold([opened(), *seals(0), sealed(sample=1, reward=None)], REFILL)
    folded, (asked,) = fold([opened(), *seals(0, 1), died(0)], REFILL)
    was_open = folded.num_open_groups

    apply(folded, granted(1, sample=0), sealed(attempt=1), first=9)

    assert (drop.key, drop.state, again) == (key(1), INCOMPLETE, wanted(1, sample=1))
    assert (asked, was_open) == (wanted(1, sample=0), 1)
    assert [member.key for member in folded.ready[0].members] == [key(0, 1), key(1)]
    assert folded.ready[0].completed_by == "10-0"


def test_attempt_that_hangs_may_still_be_sealed_before_its_refill() -> None:
    events = [opened(), *seals(0), DEADLINE, granted(1, sample=1), *seals(1)]

    folded, (asked, cut, drop) = fold([*events, sealed(sample=1, attempt=1)], REFILL)

    assert (asked, samples(folded)) == (wanted(1, sample=1), [[0, 1]])
    assert isinstance(cut, GroupCut)
    assert (drop.key, drop.state) == (key(1, 1), SURPLUS)


def test_new_deadline_asks_again_until_the_refills_are_used_up() -> None:
    first = [opened(), *seals(0), DEADLINE, granted(1, sample=1)]
    second = [replace(DEADLINE, num_refills=1), granted(2, sample=1, attempt=2)]

    _, decided = fold([*first, *second, replace(DEADLINE, num_refills=2)], REFILL)

    assert decided[:2] == [wanted(1, sample=1), wanted(2, sample=1, attempt=2)]
    assert decided[2].reason == (
        "its deadline passed: 1 of 2 members after 2 refills, none of sample 1"
    )


def test_group_without_refills_is_trained_short_if_configured() -> None:
    once = replace(REFILL, max_refills=1)
    events = [opened(3), *seals(0, 1), abandoned(2), granted(1, sample=2), abandoned(2, 1)]

    short, _ = fold(events, replace(once, refill_fallback="train_short"))
    dropped, (_, drop) = fold(events, once)

    assert (samples(short), dropped.num_ready) == ([[0, 1]], 0)
    assert drop.reason == "2 of 3 members after 1 refills, none of sample 2"


def test_refill_is_unwanted_after_its_grant_or_decision() -> None:
    events = [opened(), *seals(0), DEADLINE]
    folded, (asked,) = fold(events, REFILL)
    decided, _ = fold([*events, *seals(1)], REFILL)

    before = folded.still_holds(asked)
    apply(folded, granted(1, sample=1), first=9)

    assert before
    assert not folded.still_holds(asked)
    assert not decided.still_holds(asked)


def cut_group() -> tuple[RunFold, GroupCut]:
    """Return a fold with a group that two of three samples decided, and its cut."""
    folded, (cut,) = fold([opened(3, 2), *seals(0, 1)], REFILL)
    return folded, cut


REFILLED: list[Event] = [granted(1, sample=0), sealed(attempt=1)]


def test_reopened_group_is_cut_again_when_decided() -> None:
    # The store has it open: another attempt of the sample that was cut may have started.
    folded, cut = cut_group()
    before = folded.still_holds(cut)
    apply(folded, died(0), first=4)
    while_open = folded.still_holds(cut)

    again = apply(folded, *REFILLED, first=5)

    assert (before, while_open, folded.still_holds(cut)) == (True, False, True)
    # A refill that was granted before the cut has had the group open since.
    early, _ = cut_group()
    apply(early, died(0), sealed(sample=2), first=4)
    assert again == apply(early, *REFILLED[:1] * 2, first=6) == [replace(cut, num_granted=1)]
    # Without a cut, it gave the group another deadline.
    uncut, _ = fold([opened(), *seals(0, 1)], REFILL)
    _, only = apply(uncut, died(0), *REFILLED, first=4)
    assert isinstance(only, GroupCut)
    assert (only.group_id, only.num_granted) == ("g0", 1)


def test_cut_is_void_after_a_config_that_keeps_surplus() -> None:
    folded, cut = cut_group()
    apply(folded, died(0), first=4)
    folded.revise("5-0", replace(REFILL, surplus="keep"))

    decided = apply(folded, *REFILLED, first=6)

    assert (decided, folded.num_ready) == ([], 1)
    assert not folded.still_holds(cut)


def test_group_waits_for_a_reward_and_components_that_come_later() -> None:
    of = replace(CONFIG, estimator="gdpo", component_weights=(("a", 1.0), ("b", 1.0)))
    whole = replace(sealed(sample=0), reward_components={"a": 1.0, "b": 0.0})
    events = [opened(), whole, awaiting(1, reward_components={"b": 0.25})]
    folded, decided = fold(events, of)
    num_before = folded.num_ready

    apply(folded, posted(1, 0.5, a=0.5), first=3)

    assert (num_before, decided) == (0, [])
    assert folded.ready[0].completed_by == "3-0"
    late = folded.ready[0].members[1]
    assert (late.reward, late.reward_components) == (0.5, {"a": 0.5, "b": 0.25})


def test_posted_reward_that_cannot_be_used_ends_the_member() -> None:
    of = replace(CONFIG, estimator="maxrl")

    _, (drop, group) = fold([opened(), *seals(0), awaiting(1), posted(1, -1.0)], of)

    assert (drop.key, drop.state) == (key(1), INCOMPLETE)
    assert (group.keys, group.state) == ((key(0),), INCOMPLETE)


def test_missed_reward_drops_shortens_or_refills_its_group() -> None:
    events = [opened(3), *seals(0, 1), awaiting(2), missed(2)]

    dropped, (drop, group) = fold(events)
    spared, (other,) = fold([opened(3, 2), *seals(0), awaiting(2), missed(2), *seals(1)])
    short, _ = fold(events, SHORT)
    _, refilled = fold(events, REFILL)

    assert (drop.key, drop.reason) == (key(2), "no reward was posted before its deadline")
    assert (group.keys, dropped.num_open_groups) == ((key(0), key(1)), 0)
    assert (samples(spared), other.key) == ([[0, 1]], key(2))
    assert samples(short) == [[0, 1]]
    assert refilled[1] == wanted(1, sample=2)


def test_member_that_awaits_its_reward_is_surplus_or_dropped_with_its_group() -> None:
    folded, (surplus, cut) = fold([opened(3, 2), awaiting(2), *seals(0, 1), posted(2)])
    _, (drop,) = fold([opened(3), *seals(1), awaiting(0), DEADLINE])

    assert (surplus.key, surplus.state, samples(folded)) == (key(2), SURPLUS, [[0, 1]])
    assert isinstance(cut, GroupCut)
    assert drop.keys == (key(0), key(1))
