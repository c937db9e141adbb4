"""Groups that finish: first n of m, deadlines, refills, late rewards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from testkit import config, sealed
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import GroupCut, GroupDropped, MemberDropped, RefillWanted
from turnstream.batching.fold.readiness import RunFold
from turnstream.types import (
    DeadlineFired,
    Event,
    GroupOpened,
    RefillGranted,
    RewardPosted,
    SealedTrajectory,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
)

CONFIG = config()
SHORT = replace(CONFIG, deadline_policy="train_short", group_deadline_s=60)
REFILL = replace(CONFIG, deadline_policy="refill", max_refills=2)
KEEP = replace(CONFIG, surplus="keep")
INCOMPLETE, SURPLUS = TrajectoryState.INCOMPLETE, TrajectoryState.SURPLUS
DEADLINE = DeadlineFired(group_id="g0")


def opened(num_samples: int = 4, num_needed: int = 0) -> GroupOpened:
    return GroupOpened(
        group_id="g0", prompt_uid="uid", num_samples=num_samples, num_needed=num_needed
    )


def key(sample: int, attempt: int = 0) -> TrajectoryKey:
    return TrajectoryKey("g0", sample, attempt)


def abandoned(sample: int, attempt: int = 0) -> TrajectoryAbandoned:
    return TrajectoryAbandoned(key=key(sample, attempt), reason="gave up")


def died(sample: int) -> TrajectoryDied:
    return TrajectoryDied(key=key(sample), reason="checksum")


def awaiting(sample: int, attempt: int = 0) -> SealedTrajectory:
    return replace(sealed(sample=sample, attempt=attempt, reward=None), awaits_reward=True)


def late(sample: int) -> DeadlineFired:
    return DeadlineFired(group_id="g0", awaited=key(sample))


def granted(number: int, sample: int, attempt: int = 1) -> RefillGranted:
    return RefillGranted(key=key(sample, attempt), number=number)


def wanted(number: int, sample: int, attempt: int = 1) -> RefillWanted:
    return RefillWanted(key=key(sample, attempt), prompt_uid="uid", number=number)


def seals(*samples: int) -> list[Event]:
    return [sealed(sample=sample) for sample in samples]


def fold(events: Iterable[Event], of: BatchingConfig = CONFIG) -> tuple[RunFold, list[Any]]:
    state = RunFold(of)
    decided = [each for i, event in enumerate(events) for each in state.apply(f"{i}-0", event)]
    return state, decided


def ready(state: RunFold) -> list[list[int]]:
    return [[member.key.sample for member in group.members] for group in state.ready]


# --------------------------------------------------------------------------------------
# first n of m


def test_first_needed_members_decide_the_group_and_cut_the_others() -> None:
    state, decided = fold([opened(4, 2), *seals(3, 1)])

    assert ready(state) == [[1, 3]]
    assert state.ready[0].completed_by == "2-0"
    assert decided == [GroupCut(group_id="g0", reason="its group was decided by 2 of 4")]


def test_a_member_sealed_after_the_decision_is_surplus() -> None:
    state, (_, drop) = fold([opened(4, 2), *seals(3, 1, 0)])

    assert ready(state) == [[1, 3]]
    assert drop == MemberDropped(
        key=key(0), state=SURPLUS, reason="its group was decided before it was sealed"
    )


def test_kept_surplus_joins_until_the_group_is_taken() -> None:
    state, decided = fold([opened(4, 2), *seals(3, 1, 0)], KEEP)
    joined = state.ready

    left_over = state.take(joined)
    (drop,) = state.apply("9-0", sealed(sample=2))

    assert ([m.key.sample for m in joined[0].members], decided, left_over) == ([0, 1, 3], [], [])
    assert joined[0].completed_by == "3-0"
    assert isinstance(drop, MemberDropped)
    assert (drop.key, drop.state) == (key(2), SURPLUS)


def test_kept_group_is_planned_without_members_that_await_rewards() -> None:
    state, _ = fold([opened(3, 2), *seals(0, 1), awaiting(2)], KEEP)

    (drop,) = state.take(state.ready)
    after = state.apply("9-0", RewardPosted(key=key(2), reward=1.0))

    assert isinstance(drop, MemberDropped)
    assert (drop.key, drop.state, after) == (key(2), SURPLUS, [])


def test_fewer_than_needed_are_trained_where_every_other_sample_ended() -> None:
    state, decided = fold([opened(4, 3), *seals(0, 1), abandoned(2), abandoned(3)])

    assert (ready(state), decided) == ([[0, 1]], [])


# --------------------------------------------------------------------------------------
# deadlines


def test_a_group_whose_deadline_fires_is_dropped_with_what_it_lacks() -> None:
    state, (drop,) = fold([opened(), *seals(0, 2), DEADLINE])

    assert state.num_open_groups == 0
    assert drop == GroupDropped(
        group_id="g0",
        state=INCOMPLETE,
        reason="its deadline passed: 2 of 4 members, none of sample 1, 3",
        keys=(key(0), key(2)),
    )


def test_a_group_is_trained_short_with_what_is_sealed() -> None:
    state, decided = fold([opened(), *seals(0, 2), DEADLINE], SHORT)

    assert ready(state) == [[0, 2]]
    assert decided == [GroupCut(group_id="g0", reason="its group was decided by 2 of 4")]


@pytest.mark.parametrize("of", [CONFIG, SHORT, REFILL])
def test_the_deadline_of_a_decided_group_changes_nothing(of: BatchingConfig) -> None:
    state, decided = fold([opened(2), *seals(0, 1), DEADLINE], of)

    assert (ready(state), decided) == ([[0, 1]], [])


# --------------------------------------------------------------------------------------
# refills


@pytest.mark.parametrize(
    "end", [abandoned(1), sealed(sample=1, reward=None)], ids=["abandoned", "unusable"]
)
def test_a_sample_that_ends_without_a_member_is_asked_for_again(end: Event) -> None:
    state, decided = fold([opened(2), *seals(0), end], REFILL)

    assert decided[-1] == wanted(1, sample=1)
    assert state.still_holds(decided[-1])
    assert (state.num_ready, state.num_open_groups) == (0, 1)


def test_a_member_that_dies_in_an_open_group_is_asked_for_again() -> None:
    _, decided = fold([opened(2), *seals(0), died(0)], REFILL)

    assert decided == [wanted(1, sample=0)]


def test_ready_group_is_reopened_for_the_refill_of_a_dead_member() -> None:
    state, decided = fold([opened(2), *seals(0, 1), died(0)], REFILL)
    was_open = state.num_open_groups

    events = [granted(1, sample=0), sealed(sample=0, attempt=1)]
    decided += [each for i, e in enumerate(events) for each in state.apply(f"{9 + i}-0", e)]

    assert (decided[0], was_open) == (wanted(1, sample=0), 1)
    assert [member.key for member in state.ready[0].members] == [key(0, 1), key(1)]
    assert state.ready[0].completed_by == "10-0"


def test_the_attempt_that_hangs_may_still_win_against_its_refill() -> None:
    events = [opened(2), *seals(0), DEADLINE, granted(1, sample=1), *seals(1)]

    state, (asked, cut, drop) = fold([*events, sealed(sample=1, attempt=1)], REFILL)

    assert (asked, ready(state)) == (wanted(1, sample=1), [[0, 1]])
    assert isinstance(cut, GroupCut)
    assert (drop.key, drop.state) == (key(1, 1), SURPLUS)


def test_a_sample_is_spared_where_enough_others_may_come() -> None:
    _, decided = fold([opened(4, 2), abandoned(0), abandoned(1)], REFILL)
    _, third = fold([opened(4, 2), abandoned(0), abandoned(1), abandoned(2)], REFILL)

    assert (decided, third) == ([], [wanted(1, sample=0)])


def test_a_deadline_asks_for_what_ended_and_what_hangs() -> None:
    events = [opened(4, 3), *seals(0), abandoned(3), DEADLINE]

    _, decided = fold(events, REFILL)

    assert decided == [wanted(1, sample=3), wanted(2, sample=1)]


def test_a_deadline_does_not_ask_for_what_was_asked_for_before() -> None:
    _, decided = fold([opened(3), *seals(0), abandoned(1), DEADLINE], REFILL)

    assert decided == [wanted(1, sample=1), wanted(2, sample=2)]


def test_a_new_deadline_asks_again_until_the_refills_are_used_up() -> None:
    first = [opened(2), *seals(0), DEADLINE, granted(1, sample=1)]
    second = [DeadlineFired(group_id="g0", num_refills=1), granted(2, sample=1, attempt=2)]

    _, decided = fold([*first, *second, DeadlineFired(group_id="g0", num_refills=2)], REFILL)

    assert decided[:2] == [wanted(1, sample=1), wanted(2, sample=1, attempt=2)]
    assert decided[2].reason == (
        "its deadline passed: 1 of 2 members after 2 refills, none of sample 1"
    )


def test_group_without_refills_is_trained_short_if_configured() -> None:
    of = replace(REFILL, max_refills=1, refill_fallback="train_short")
    events = [opened(3), *seals(0, 1), abandoned(2), granted(1, sample=2)]

    state, _ = fold([*events, abandoned(2, attempt=1)], of)
    dropped, (_, drop) = fold([*events, abandoned(2, attempt=1)], replace(REFILL, max_refills=1))

    assert (ready(state), dropped.num_ready) == ([[0, 1]], 0)
    assert drop.reason == "2 of 3 members after 1 refills, none of sample 2"


def test_repeated_deadline_after_its_refill_requests_nothing() -> None:
    events = [opened(2), *seals(0), DEADLINE, granted(1, sample=1), DEADLINE]

    _, decided = fold(events, REFILL)

    assert decided == [wanted(1, sample=1)]


def test_refill_is_unwanted_after_its_grant_or_decision() -> None:
    events = [opened(2), *seals(0), DEADLINE]
    state, (asked,) = fold(events, REFILL)
    decided, _ = fold([*events, *seals(1)], REFILL)

    before = state.still_holds(asked)
    state.apply("9-0", granted(1, sample=1))

    assert before
    assert not state.still_holds(asked)
    assert not decided.still_holds(asked)


# --------------------------------------------------------------------------------------
# rewards


def test_a_group_waits_for_a_reward_that_comes_later() -> None:
    state, decided = fold([opened(2), *seals(0), awaiting(1)])
    num_before = state.num_ready

    state.apply("3-0", RewardPosted(key=key(1), reward=0.5))

    assert (num_before, decided) == (0, [])
    assert [member.reward for member in state.ready[0].members] == [1.0, 0.5]
    assert state.ready[0].completed_by == "3-0"


def test_components_of_the_seal_and_of_the_post_are_put_together() -> None:
    of = replace(CONFIG, estimator="gdpo", component_weights=(("a", 1.0), ("b", 1.0)))
    whole = replace(sealed(sample=0), reward_components={"a": 1.0, "b": 0.0})
    part = replace(awaiting(1), reward_components={"b": 0.25})

    state, _ = fold(
        [opened(2), whole, part, RewardPosted(key=key(1), reward_components={"a": 0.5})], of
    )

    assert state.ready[0].members[1].reward_components == {"a": 0.5, "b": 0.25}


def test_a_posted_reward_that_cannot_be_used_ends_the_member() -> None:
    of = replace(CONFIG, estimator="maxrl")

    _, (drop, group) = fold(
        [opened(2), *seals(0), awaiting(1), RewardPosted(key=key(1), reward=-1.0)], of
    )

    assert (drop.key, drop.state) == (key(1), INCOMPLETE)
    assert (group.keys, group.state) == ((key(0),), INCOMPLETE)


def test_a_missed_reward_drops_the_group_that_cannot_do_without_it() -> None:
    state, (drop, group) = fold([opened(3), *seals(0, 1), awaiting(2), late(2)])

    assert (drop.key, drop.reason) == (key(2), "no reward was posted before its deadline")
    assert (group.keys, state.num_open_groups) == ((key(0), key(1)), 0)


def test_a_missed_reward_is_spared_where_enough_others_may_come() -> None:
    state, decided = fold([opened(3, 2), *seals(0), awaiting(2), late(2), *seals(1)])

    assert (ready(state), [drop.keys for drop in decided]) == ([[0, 1]], [(key(2),)])


def test_a_missed_reward_leaves_the_group_short_or_is_refilled() -> None:
    events = [opened(3), *seals(0, 1), awaiting(2), late(2)]

    short, _ = fold(events, SHORT)
    _, refilled = fold(events, REFILL)

    assert ready(short) == [[0, 1]]
    assert refilled[1] == wanted(1, sample=2)


def test_member_that_awaits_its_reward_at_the_decision_is_surplus() -> None:
    events = [opened(3, 2), awaiting(2), *seals(0, 1)]

    state, (drop, cut) = fold([*events, RewardPosted(key=key(2), reward=1.0)])

    assert (drop.key, drop.state, ready(state)) == (key(2), SURPLUS, [[0, 1]])
    assert isinstance(cut, GroupCut)


def test_member_that_awaits_its_reward_is_dropped_with_its_group() -> None:
    _, (drop,) = fold([opened(3), *seals(1), awaiting(0), DEADLINE])

    assert drop.keys == (key(0), key(1))


def test_says_what_an_undecided_group_waits_for() -> None:
    state, _ = fold([opened(4, 3), *seals(1), awaiting(0), abandoned(2)], REFILL)

    (waiting,) = state.waiting()

    assert (waiting.group_id, waiting.opened_by) == ("g0", "0-0")
    assert (waiting.num_members, waiting.num_needed) == (1, 3)
    assert (waiting.samples, waiting.awaiting) == ((0, 3), (key(0),))
