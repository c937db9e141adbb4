"""Changes of the config, and their effect on groups that the fold already has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testkit import ZERO_VARIANCE, config, sealed, shape
from testkit.runs.folds import apply, fold, key, opened, seals
from turnstream.batching.config.rules import FIXED, changed_settings, check_revision
from turnstream.batching.fold.decisions import GroupCut, GroupDropped, MemberDropped, RefillWanted
from turnstream.batching.planning.selection import Selector
from turnstream.errors import InvalidConfigError
from turnstream.types import (
    BatchDue,
    DeclaredColumn,
    Event,
    SealedTrajectory,
    Status,
    TrajectoryState,
)

GDPO = replace(config(), estimator="gdpo", component_weights=(("form", 1.0), ("result", 1.0)))


def of_components(group_id: str, sample: int, *names: str) -> SealedTrajectory:
    components = {name: float(sample) for name in names}
    return replace(sealed(group_id, sample=sample), reward_components=components)


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("extra_columns", (DeclaredColumn(name="routes", dtype="uint8", per="token"),)),
        ("aggregation", "seq_mean_token_mean"),
        ("row_weights", "per_trajectory"),
    ],
)
def test_setting_that_a_change_would_break_is_refused(name, after) -> None:
    before = replace(config(), aggregation="seq_mean_token_sum")
    assert FIXED.keys() == {"extra_columns", "aggregation", "row_weights"}

    with pytest.raises(InvalidConfigError) as caught:
        check_revision(before, replace(before, **{name: after}))

    assert caught.value.field == name
    assert FIXED[name] in str(caught.value)


@pytest.mark.parametrize(
    ("before", "changes", "name"),
    [
        ("gae", {"estimator": "rloo"}, "estimator"),
        ("rloo", {"estimator": "gae"}, "estimator"),
        ("gae", {"reward_source": "sum_of_turns"}, "reward_source"),
    ],
)
def test_settings_that_a_critic_depends_on_cannot_be_revised(
    before: Any, changes: dict[str, Any], name: str
) -> None:
    run = replace(config(), estimator=before)

    with pytest.raises(InvalidConfigError, match=f"^{name}: it cannot be revised from .*trainer"):
        check_revision(run, replace(run, **changes))
    check_revision(run, replace(run, max_staleness=3))


def test_differing_settings_are_listed_with_both_values() -> None:
    before = replace(config(2), max_staleness=1)
    after = replace(before, max_staleness=3, estimator="rloo")

    check_revision(before, after)

    assert changed_settings(before, after) == (
        ("estimator", "grpo", "rloo"),
        ("max_staleness", 1, 3),
    )
    assert changed_settings(before, before) == ()


def test_decided_group_stays_if_the_new_config_can_train_it() -> None:
    # All rewards are equal: a group that is decided from now on would be filtered.
    folded, _ = fold([opened(), *seals(0, 1), opened(group_id="later")])

    at_once = folded.revise("5-0", replace(config(), group_filters=ZERO_VARIANCE))
    later = apply(folded, *seals(0, 1, group_id="later"), first=6)

    assert at_once == []
    assert [group.group_id for group in folded.ready] == ["g0"]
    assert [drop.state for drop in later if isinstance(drop, GroupDropped)] == [
        TrajectoryState.FILTERED
    ]


def test_incomparable_member_is_dropped_with_its_short_group() -> None:
    events: list[Event] = [opened(3, group_id="kept"), opened(2, group_id="lost")]
    events += [of_components("kept", s, "form", "result") for s in (0, 1)]
    events += [of_components("kept", 2, "form")]
    events += [of_components("lost", 0, "form"), of_components("lost", 1, "form", "result")]
    folded, _ = fold(events)
    num_before = folded.num_ready

    cut, lost, dropped = folded.revise("9-0", GDPO)

    (kept,) = folded.ready
    assert (num_before, kept.group_id, kept.completed_by) == (2, "kept", "9-0")
    assert [member.key.sample for member in kept.members] == [0, 1]
    assert isinstance(cut, MemberDropped)
    assert isinstance(lost, MemberDropped)
    assert (cut.key, lost.key) == (key(2, group_id="kept"), key(0, group_id="lost"))
    assert cut.reason == "sample 2 has no reward component 'result'"
    assert isinstance(dropped, GroupDropped)
    assert (dropped.group_id, dropped.state) == ("lost", TrajectoryState.INCOMPLETE)


def test_member_of_an_open_group_is_judged_and_refilled() -> None:
    refill = replace(GDPO, deadline_policy="refill", max_refills=1)
    folded, _ = fold([opened(), of_components("g0", 0, "form")])

    decisions = folded.revise("3-0", refill)

    assert decisions == [
        MemberDropped(
            key=key(0),
            state=TrajectoryState.INCOMPLETE,
            reason="sample 0 has no reward component 'result'",
        ),
        RefillWanted(key=key(0, 1), prompt_uid="uid of g0", number=1),
    ]


@pytest.mark.parametrize(
    ("member", "changes", "decided"),
    [
        (
            sealed(sample=1, status=Status.TRUNCATED),
            {"mask_truncated": True, "masked_reward": "leave_out"},
            [GroupDropped],
        ),
        (
            sealed(sample=1, turns=[shape(20, 20)]),
            {"max_tokens_per_micro_batch": 16, "over_long": "refuse"},
            [MemberDropped, GroupDropped],
        ),
    ],
    ids=["masked", "too long"],
)
def test_group_with_too_few_comparable_members_is_dropped(
    member: SealedTrajectory, changes: dict[str, Any], decided: list[type]
) -> None:
    folded, _ = fold([opened(), *seals(0), member])
    num_before = folded.num_ready

    decisions = folded.revise("4-0", replace(config(), **changes))

    assert [type(each) for each in decisions] == decided
    assert (num_before, folded.num_ready) == (1, 0)
    assert "1 valid members, and 2 are needed to compare" in repr(decisions[-1])


def test_unplanned_choice_is_repeated_with_the_new_config() -> None:
    before = replace(config(1), selection="in_order")
    events = [opened(group_id="a"), opened(group_id="b")]
    events += [each for name in "ba" for each in seals(0, 1, group_id=name)]
    (folded, _), selector = fold(events, before), Selector(before)
    selector.apply("7-0", BatchDue(step=1), folded)
    first = selector.choice

    after = replace(before, batch_groups=2, mini_batch_groups=2)
    selector.revise(after)
    folded.revise("8-0", after)
    undone = selector.choice
    selector.apply("9-0", BatchDue(step=1), folded)

    assert first is not None
    assert undone is None
    assert selector.choice is not None
    assert [group.group_id for group in first.groups] == ["a"]
    assert [group.group_id for group in selector.choice.groups] == ["a", "b"]


def test_ready_groups_do_not_count_as_open_with_a_limit() -> None:
    before = replace(config(4), surplus="drop")
    folded, _ = fold([opened(), *seals(0, 1)], before)

    decided = folded.revise("4-0", replace(before, max_open_groups=1))

    assert [type(each) for each in decided] == [GroupCut]
    assert [each.group_id for each in folded.ready] == ["g0"]
    assert folded.revise("5-0", replace(before, max_open_groups=1)) == []
