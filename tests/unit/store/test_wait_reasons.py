"""Reasons for waiting, from a snapshot of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testkit.snapshots import scanned, snapshot
from turnstream.errors import WaitKind, WaitReason
from turnstream.store.run.tasks import PromptCounts
from turnstream.store.waits.awaited import no_refill
from turnstream.store.waits.wait_reasons import reasons
from turnstream.store.waits.wait_snapshot import (
    MAX_NAMED,
    AwaitedReward,
    Durations,
    LapsedWriter,
    OpenMember,
    WaitingGroup,
    WaitSnapshot,
    lapsed_writers,
)
from turnstream.store.waits.wait_warnings import WaitWarnings
from turnstream.types import GroupOpened, Purpose, TrajectoryKey

ALIVE = OpenMember(key=TrajectoryKey("g", 1), writer="w", lease_left_s=30.0)
LAPSED = replace(ALIVE, lease_left_s=-7.0)
GROUP = WaitingGroup(group_id="g", age_s=90.0, num_sealed=1, num_needed=2)
REWARD = AwaitedReward(key=TrajectoryKey("g", 0), since_s=12.0, deadline_left_s=4.0)
REFILLS = ((TrajectoryKey("g", 1, 2), 33.0),)
GONE = LapsedWriter(writer="w", num_open=3, silent_s=7.0)
OFFERED: dict[str, Any] = {"planned": 3}
"""The trainer waits for nothing."""


def kinds(seen: WaitSnapshot, **asked: Any) -> list[str]:
    return [reason.kind for reason in reasons(seen, **asked)]


def the(kind: WaitKind, seen: WaitSnapshot) -> WaitReason:
    (found,) = [reason for reason in reasons(seen) if reason.kind is kind]
    return found


def test_generator_without_obstacles_gets_no_reason() -> None:
    assert reasons(snapshot(num_ready=4)) == []
    assert reasons(None) == []


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        (OFFERED, "step 3 is offered"),
        ({"num_ready": 4}, "the 4 groups of step 3 are about to be planned"),
    ],
)
def test_scanned_run_without_obstacles_is_healthy(changes: dict[str, Any], state: str) -> None:
    (found,) = reasons(scanned(**changes))

    assert (found.kind, found.sentence) == (WaitKind.NOTHING_WRONG, f"nothing is wrong: {state}")


def test_newest_batch_without_an_advantage_is_a_reason() -> None:
    (found,) = reasons(scanned(**OFFERED, num_flat_groups=4))

    assert found.kind is WaitKind.NO_SIGNAL
    assert found.facts == {"step": 3, "groups": 4}
    assert found.sentence.startswith("all advantages of step 3, the newest batch, are 0: the rew")


@pytest.mark.parametrize(
    ("session_epoch", "trainer"),
    [(1, "trainer session 1 has it for 95 s"), (0, "no trainer session has begun for 95 s")],
)
def test_planned_step_waits_for_the_trainer_and_its_ranks(session_epoch: int, trainer: str) -> None:
    waits: dict[str, Any] = {"durations": Durations(trainer_s=95.2), "session_epoch": session_epoch}

    found = the(WaitKind.TRAINER_NOT_STEPPED, scanned(planned=4, behind=(1, 3), **waits))

    assert found.sentence == (
        f"step 3 is planned and not stepped; {trainer}; dp_rank 1, 3 did not ask for it"
    )
    assert {"awaited": 3, "planned": 4, "since_s": 95.2}.items() <= found.facts.items()
    assert found.facts["behind"] == "1, 3"


def test_generator_waits_for_any_planned_step_but_run_for_full_plan() -> None:
    assert kinds(snapshot(**OFFERED)) == [WaitKind.TRAINER_NOT_STEPPED]
    assert kinds(scanned(**OFFERED)) == [WaitKind.NOTHING_WRONG]


def test_damaged_payload_has_the_command_until_it_is_solved() -> None:
    damage = (3, "step 3: damaged payload of g/0/0")

    found = reasons(scanned(planned=3, damage=damage))[0]

    assert found.kind is WaitKind.PAYLOAD_DAMAGED
    assert found.facts == {"step": 3, "damage": "step 3: damaged payload of g/0/0"}
    for solved in (scanned(damage=damage), scanned(planned=3, stepped=3, damage=damage)):
        assert WaitKind.PAYLOAD_DAMAGED not in kinds(solved)


def test_one_group_below_the_limits_is_within_capacity() -> None:
    free = snapshot(num_live=15, num_open=2, config={"max_open_groups": 3})

    assert WaitKind.OUT_OF_CAPACITY not in kinds(free)


def test_missing_announcement_is_the_reason_where_it_limits_admission() -> None:
    few = {"num_live": 16, "planned": 2, "stepped": 2, "durations": Durations(step_s=4.0)}
    found = the(WaitKind.WEIGHTS_NOT_ANNOUNCED, snapshot(announced=1, **few))

    assert found.sentence.endswith(
        "are allowed after step 1; step 2 is stepped, and its weights are not announced for 4 s"
    )
    assert found.facts["announced"] == 1
    for announced in (None, 2):
        assert WaitKind.WEIGHTS_NOT_ANNOUNCED not in kinds(snapshot(announced=announced, **few))


def test_observer_that_alone_keeps_steps_accompanies_the_reasons() -> None:
    seen = scanned(**OFFERED, released=3, unseen_by="'audit' has seen step 3")

    assert kinds(seen) == [WaitKind.NOTHING_WRONG, WaitKind.OBSERVER_BEHIND]
    assert the(WaitKind.OBSERVER_BEHIND, seen).sentence.startswith(
        "no step after step 3 is deleted: observer 'audit' has seen step 3; `turnstream run remove"
    )


def test_unknown_times_and_versions_are_left_out() -> None:
    found = the(WaitKind.OUT_OF_DATA, snapshot(num_waiting=0))

    assert found.sentence == (
        "step 3: 1 of 4 groups ready, and no generator has a group open; "
        "no policy version was announced"
    )


def test_run_with_all_prompts_done_reports_it_until_closed() -> None:
    done = scanned(num_waiting=0, prompts=PromptCounts(num_added=9, num_filtered=2))

    assert the(WaitKind.PROMPTS_EXHAUSTED, done).sentence == (
        "all 9 prompts of the run are done, 2 of them filtered: add others, or close the run"
    )
    for change in (
        {"prompts": PromptCounts(num_added=9, num_left=1)},
        {"prompts": PromptCounts(num_added=9, num_given=1)},
        {"prompts": PromptCounts()},
        {"is_closed": True},
    ):
        assert WaitKind.PROMPTS_EXHAUSTED not in kinds(replace(done, **change))


def test_generator_is_gone_when_all_its_leases_have_lapsed() -> None:
    dead = [replace(LAPSED, writer="dead", lease_left_s=left_s) for left_s in (-40.0, -30.0)]
    slow = [replace(LAPSED, writer="slow"), replace(ALIVE, writer="slow")]

    gone = lapsed_writers([*dead, *slow])

    assert gone == (LapsedWriter(writer="dead", num_open=2, silent_s=30.0),)
    assert the(WaitKind.GENERATOR_GONE, snapshot(lapsed_writers=gone)).sentence == (
        "generator dead is gone: all 2 trajectories that it writes have lapsed, the last 30 s ago"
    )


def test_bounded_number_of_lapsed_generators_is_named_largest_first() -> None:
    writers = [f"w{number}" for number in range(MAX_NAMED + 2)]
    gone = lapsed_writers([replace(LAPSED, writer=writer) for writer in (*writers, "w5")])

    assert len(gone) == MAX_NAMED
    assert (gone[0].writer, gone[0].num_open) == ("w5", 2)


def test_open_members_are_a_reason_only_if_something_waits_for_them() -> None:
    groups = (replace(GROUP, open_members=(ALIVE,)),)
    fed: dict[str, Any] = {"groups": groups, "num_ready": 4}

    assert kinds(snapshot(**fed)) == []
    for waits in (
        snapshot(groups=groups),
        snapshot(**fed, num_open=1, config={"max_open_groups": 1}),
        snapshot(**fed, prompts=PromptCounts(num_given=1)),
    ):
        assert WaitKind.MEMBER_OPEN in kinds(waits)
    assert kinds(scanned(**fed, prompts=PromptCounts(num_given=1))) == [WaitKind.NOTHING_WRONG]


@pytest.mark.parametrize(("dropped", "planned"), [(10, 9), (2, 0)])
def test_half_of_the_groups_and_a_few_groups_are_no_reason(dropped: int, planned: int) -> None:
    live = planned + 2
    seen = scanned(num_live=live, num_opened=live + dropped, planned_groups=planned)

    assert WaitKind.PASS_RATE_LOW not in kinds(seen)


def test_pass_rate_covers_the_last_two_batches() -> None:
    fell = {"num_opened": 110, "num_live": 104, "planned_groups": 102}
    rose = {"num_opened": 110, "num_live": 12, "planned_groups": 10}

    of_fall = the(WaitKind.PASS_RATE_LOW, scanned(at_plans="1:1:100", **fell))
    of_rise = kinds(scanned(at_plans="1:98:2,2:98:6", **rose))

    assert {"dropped": 5, "decided": 8, "since_step": 1}.items() <= of_fall.facts.items()
    assert WaitKind.PASS_RATE_LOW not in of_rise


def test_finished_run_needs_no_planner() -> None:
    (found,) = reasons(scanned(is_closed=True, num_ready=0, num_waiting=0, planner=""))

    assert (found.kind, found.sentence) == (
        WaitKind.RUN_FINISHED,
        "run maze is closed and finished: all 2 steps are stepped",
    )


def test_closed_run_waits_for_open_groups_and_for_its_last_short_batch() -> None:
    closed = scanned(is_closed=True, num_live=16)

    assert kinds(closed) == [WaitKind.TOO_FEW_READY, WaitKind.RUN_CLOSED]
    assert kinds(replace(closed, num_waiting=0)) == [WaitKind.NOTHING_WRONG, WaitKind.RUN_CLOSED]


def test_while_a_batch_is_offered_only_what_has_failed_is_a_reason() -> None:
    group = replace(GROUP, open_members=(ALIVE, LAPSED), awaited=(REWARD,), not_started=(3,))

    assert kinds(scanned(planned=3, groups=(group,), refills=REFILLS)) == [WaitKind.MEMBER_LAPSED]


def test_the_most_important_reason_comes_first() -> None:
    group = replace(GROUP, open_members=(ALIVE, LAPSED), awaited=(REWARD,), not_started=(3,))
    seen = scanned(
        num_opened=100,
        num_live=16,
        planner="",
        store_trouble="its disk is full",
        groups=(group,),
        refills=REFILLS,
        lapsed_writers=(GONE,),
    )

    assert kinds(seen) == [
        WaitKind.STORE_REFUSES_WRITES,
        WaitKind.NO_PLANNER,
        WaitKind.TOO_FEW_READY,
        WaitKind.GENERATOR_GONE,
        WaitKind.MEMBER_LAPSED,
        WaitKind.PASS_RATE_LOW,
        WaitKind.REWARD_AWAITED,
        WaitKind.REFILL_OPEN,
        WaitKind.MEMBER_NOT_STARTED,
        WaitKind.MEMBER_OPEN,
        WaitKind.OUT_OF_CAPACITY,
    ]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "the run grants none: its deadline_policy is 'drop'"),
        ({"num_refills": 2}, "the 2 attempts that were granted are tried by others, or here"),
        (
            {"config": {"deadline_policy": "refill", "max_refills": 1, "group_deadline_s": 9}},
            "1 groups are open, and no attempt of any was granted",
        ),
    ],
)
def test_wait_for_a_refill_says_whether_the_run_grants_any(
    fields: dict[str, Any], sentence: str
) -> None:
    first = no_refill(snapshot(**fields), waited_s=3.0)[0]

    assert (first.kind, first.sentence, first.facts["waited_s"]) == ("no_refill", sentence, 3.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"budget": {"planned": 1_000_000}}, []),
        ({"budget": {"planned": 100_000, "max_bytes": 120_000}}, []),
        ({"budget": {"planned": 100_001, "max_bytes": 120_000}}, [WaitKind.OUT_OF_BYTES]),
        (
            {"budget": {"planned": 120_001, "max_bytes": 120_000}},
            [WaitKind.OUT_OF_BYTES, WaitKind.BUDGET_TOO_SMALL],
        ),
        ({"budget": {"used": 780_000, "allowed": 1_000_000}}, []),
        ({"budget": {"used": 780_001, "allowed": 1_000_000}}, [WaitKind.OUT_OF_BYTES]),
        (
            {"budget": {"used": 770_000, "reserved": 10_001, "allowed": 1_000_000}},
            [WaitKind.OUT_OF_BYTES],
        ),
    ],
)
def test_bytes_are_a_reason_if_no_usual_group_may_start(
    changes: dict[str, Any], expected: list[WaitKind]
) -> None:
    assert kinds(scanned(**OFFERED, **changes)) == (expected or [WaitKind.NOTHING_WRONG])


def test_starving_trainer_gets_groups_by_the_urgent_rule() -> None:
    held: dict[str, Any] = {"budget": {"stored": 600_000, "max_bytes": 600_000}}
    train = GroupOpened(group_id="g", prompt_uid="", num_samples=2)
    evaluate = replace(train, purpose=Purpose.EVAL)

    assert kinds(snapshot(**held), group=train) == [WaitKind.TOO_FEW_READY]
    assert kinds(snapshot(num_ready=4, **held), group=train) == [WaitKind.OUT_OF_BYTES]
    assert kinds(snapshot(**held), group=evaluate) == [WaitKind.OUT_OF_BYTES]
    for used, is_short in ((880_000, False), (880_001, True)):
        seen = scanned(budget={"used": used, "allowed": 1_000_000})
        assert (WaitKind.OUT_OF_BYTES in kinds(seen)) == is_short


@pytest.mark.parametrize(("num_samples", "is_full"), [(1, False), (2, True)])
def test_memory_of_the_server_is_counted_for_every_sample(num_samples: int, is_full: bool) -> None:
    group = GroupOpened(group_id="g", prompt_uid="", num_samples=num_samples)
    seen = snapshot(num_ready=4, budget={"allowed": 1_000_000, "used": 770_000})

    assert kinds(seen, group=group) == [WaitKind.OUT_OF_BYTES] * is_full


def test_warning_is_due_despite_rounding_of_the_clock() -> None:
    # A wait of 4.999999999999999 s was not due, and its timer of 9e-16 s was set again and again.
    began_s = 4.953396763492209
    warnings = WaitWarnings()
    pause_s = warnings.pause_s(0.0)
    assert pause_s is not None

    waited_s = (began_s + pause_s - 1e-15) - began_s

    assert waited_s < 5.0
    assert warnings.is_due(waited_s)
