from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from turnstream.store.run.tasks import PromptCounts
from turnstream.store.waits.wait_durations import Lasting
from turnstream_server.bus.core.frontier import PayloadDamage
from turnstream_server.bus.queries.run_snapshot import (
    AwaitedReward,
    OpenMember,
    OpenRefill,
    RunSnapshot,
    SilentWriter,
    WaitingGroup,
)
from turnstream_server.bus.queries.wait_reasons import Reason, ReasonKind, reasons

Starved = Callable[..., RunSnapshot]

ALIVE = OpenMember(sample=1, attempt=0, writer="w", lease_left_s=30.0)
LAPSED = replace(ALIVE, lease_left_s=-7.0)
GROUP = WaitingGroup(group_id="g", age_s=90.0, num_sealed=1, num_needed=2)
REWARD = AwaitedReward(sample=0, attempt=0, since_s=12.0, deadline_left_s=4.0)
REFILL = OpenRefill(group_id="g", sample=1, attempt=2, since_s=33.0)
GONE = SilentWriter(writer="w", num_open=3, silent_s=7.0)


def kinds(snapshot: RunSnapshot) -> list[ReasonKind]:
    return [reason.kind for reason in reasons(snapshot)]


def the(kind: ReasonKind, snapshot: RunSnapshot) -> Reason:
    (found,) = [reason for reason in reasons(snapshot) if reason.kind is kind]
    return found


@pytest.mark.parametrize(
    ("planner", "left_s", "sentence"),
    [
        ("", 0.0, "no batcher plans the run"),
        ("p", -3.0, "no batcher plans the run: the lease of p ended 3 s ago"),
    ],
)
def test_run_without_a_planner_reports_that_first(
    planner: str, left_s: float, sentence: str, starved: Starved
) -> None:
    found = reasons(starved(planner=planner, planner_left_s=left_s))

    assert (found[0].kind, found[0].sentence) == (ReasonKind.NO_PLANNER, sentence)


def test_store_without_writes_precedes_its_consequences(
    starved: Starved,
) -> None:
    found = reasons(starved(planner="", store_trouble="its disk is full"))

    assert [reason.kind for reason in found[:2]] == [
        ReasonKind.STORE_REFUSES_WRITES,
        ReasonKind.NO_PLANNER,
    ]
    assert found[0].sentence == "its disk is full; nothing new is acknowledged"


def test_a_planner_whose_lease_lasts_is_no_reason(starved: Starved) -> None:
    assert ReasonKind.NO_PLANNER not in kinds(starved())


@pytest.mark.parametrize(
    ("session_epoch", "trainer"),
    [(1, "trainer session 1 has it"), (0, "no trainer session has begun")],
)
def test_a_full_plan_waits_for_the_trainer(
    session_epoch: int, trainer: str, starved: Starved
) -> None:
    seen = starved(frontier={"planned": 4, "session_epoch": session_epoch})

    found = the(ReasonKind.TRAINER_NOT_STEPPED, seen)

    assert found.sentence == f"step 5 is planned when step 3 is stepped; {trainer}"
    assert {"step": 5, "awaited": 3, "session_epoch": session_epoch}.items() <= found.facts.items()


def test_trainer_has_a_duration_and_the_ranks_that_did_not_ask(
    starved: Starved,
) -> None:
    seen = starved(frontier={"planned": 4}, lasting=Lasting(trainer_s=95.2), behind=(1, 3))

    found = the(ReasonKind.TRAINER_NOT_STEPPED, seen)

    assert found.sentence == (
        "step 5 is planned when step 3 is stepped; trainer session 1 has it for 95 s; "
        "dp_rank 1, 3 did not ask for it"
    )
    assert (found.facts["since_s"], found.facts["behind"]) == (95.2, "1, 3")


@pytest.mark.parametrize(
    "changes",
    [{"most_live_groups": 8}, {"frontier": {"num_open_groups": 3}, "max_open_groups": 3}],
)
def test_a_run_out_of_capacity_says_when_the_last_group_was_opened(
    changes: dict[str, Any], starved: Starved
) -> None:
    found = the(ReasonKind.OUT_OF_CAPACITY, starved(**changes, lasting=Lasting(opened_s=95.2)))

    assert found.sentence.endswith("; the last was opened 95 s ago")
    assert found.facts["since_s"] == 95.2


def test_a_step_that_lacks_groups_says_for_how_long_it_waits(starved: Starved) -> None:
    lasting = Lasting(step_s=95.2, opened_s=130.0)

    few = the(ReasonKind.TOO_FEW_READY, starved(lasting=lasting))
    none = the(ReasonKind.OUT_OF_DATA, starved(lasting=lasting, num_waiting=0))

    assert few.sentence == "step 3 waits for 95 s: 1 of 4 groups ready, 1 open"
    assert none.sentence == (
        "step 3 waits for 95 s: 1 of 4 groups ready, and no generator has a group open; "
        "the last was opened 130 s ago; no policy version was announced"
    )
    assert few.facts["since_s"] == none.facts["since_s"] == 95.2
    assert none.facts["opened_s"] == 130.0


def test_a_trainer_session_that_ended_with_withdrawn_plans_has_nothing(starved: Starved) -> None:
    seen = starved(frontier={"planned": 4, "session_epoch": 2, "session": ""})

    found = the(ReasonKind.TRAINER_NOT_STEPPED, seen)

    assert found.sentence.endswith("no trainer session has begun")


def test_damaged_payload_has_the_command_until_it_is_solved(
    starved: Starved,
) -> None:
    damage = PayloadDamage(step=3, manifest_hash="ab", sentence="step 3: damaged payload of g/0/0")
    seen = starved(frontier={"planned": 3, "damage": damage})
    planned_again = starved(frontier={"planned": 2, "damage": damage})
    stepped = starved(frontier={"planned": 3, "stepped": 3, "damage": damage})

    found = reasons(seen)[0]

    assert found.kind is ReasonKind.PAYLOAD_DAMAGED
    assert found.sentence == (
        "step 3: damaged payload of g/0/0; `turnstream run replan maze` sets it aside, "
        "and plans again without it"
    )
    assert found.facts == {"step": 3, "damage": "step 3: damaged payload of g/0/0"}
    assert ReasonKind.PAYLOAD_DAMAGED not in {*kinds(planned_again), *kinds(stepped)}


def test_a_plan_with_room_does_not_wait_for_the_trainer(starved: Starved) -> None:
    assert kinds(starved(frontier={"planned": 3})) == [ReasonKind.NOTHING_WRONG]


def test_generators_without_capacity_wait_for_the_trainer(starved: Starved) -> None:
    found = the(ReasonKind.OUT_OF_CAPACITY, starved(most_live_groups=8))

    assert found.sentence == (
        "generators wait for the trainer: 8 groups are live, 8 are allowed after step 2"
    )
    assert ReasonKind.OUT_OF_CAPACITY not in kinds(starved(most_live_groups=9))


def test_generators_without_a_place_wait_for_groups_that_are_under_way(starved: Starved) -> None:
    seen = starved(frontier={"num_open_groups": 3}, max_open_groups=3)

    found = the(ReasonKind.OUT_OF_CAPACITY, seen)

    assert found.sentence == (
        "generators wait for groups that are under way: 3 are open, max_open_groups is 3"
    )
    assert ReasonKind.OUT_OF_CAPACITY not in kinds(replace(seen, max_open_groups=4))


@pytest.mark.parametrize(
    ("version", "policy"),
    [(None, "no policy version was announced"), (6, "the newest policy version is 6")],
)
def test_a_run_without_an_open_group_is_out_of_data(
    version: int | None, policy: str, starved: Starved
) -> None:
    found = reasons(starved(num_waiting=0, newest_version=version))

    assert [reason.kind for reason in found] == [ReasonKind.OUT_OF_DATA]
    assert found[0].sentence == (
        f"step 3: 1 of 4 groups ready, and no generator has a group open; {policy}"
    )


def test_run_with_all_prompts_done_reports_it_until_closed(starved: Starved) -> None:
    done = PromptCounts(num_added=9, num_left=0, num_given=0, num_trained=7, num_filtered=2)
    seen = starved(num_waiting=0, prompts=done)

    found = the(ReasonKind.PROMPTS_EXHAUSTED, seen)

    assert found.sentence == (
        "all 9 prompts of the run are done, 2 of them filtered: add others, or close the run"
    )
    for other in (
        replace(seen, prompts=replace(done, num_left=1)),
        replace(seen, prompts=replace(done, num_given=1)),
        replace(seen, prompts=replace(done, num_added=0)),
        replace(seen, frontier=replace(seen.frontier, is_closed=True)),
    ):
        assert ReasonKind.PROMPTS_EXHAUSTED not in kinds(other)


def test_open_groups_are_counted_in_addition_to_ready_ones(starved: Starved) -> None:
    found = the(ReasonKind.TOO_FEW_READY, starved())

    assert found.sentence == "step 3: 1 of 4 groups ready, 1 open"
    assert found.facts == {"step": 3, "ready": 1, "needed": 4, "since_s": None, "open": 1}


def test_a_generator_all_of_whose_leases_lapsed_is_gone(starved: Starved) -> None:
    found = the(ReasonKind.GENERATOR_GONE, starved(silent=(GONE,)))

    assert found.sentence == (
        "generator w is gone: all 3 trajectories that it holds have lapsed, the last 7 s ago"
    )


@pytest.mark.parametrize(
    ("member", "kind", "lease"),
    [
        (ALIVE, ReasonKind.MEMBER_OPEN, "lease renewed, 30 s left"),
        (LAPSED, ReasonKind.MEMBER_LAPSED, "lease lapsed 7 s ago"),
    ],
)
def test_a_group_names_the_member_it_waits_for(
    member: OpenMember, kind: ReasonKind, lease: str, starved: Starved
) -> None:
    group = replace(GROUP, open_members=(member,), deadline_left_s=20.0)

    found = the(kind, starved(groups=(group,)))

    assert found.sentence == (
        "group g (1 of 2 members) waits for sample 1 of generator w for 90 s: "
        f"{lease}; its deadline is in 20 s"
    )
    assert found.facts["writer"] == "w"


def test_a_group_older_than_its_events_has_no_age(starved: Starved) -> None:
    group = replace(GROUP, age_s=None, not_begun=(3,))

    found = the(ReasonKind.MEMBER_NOT_BEGUN, starved(groups=(group,)))

    assert found.sentence == (
        "group g (1 of 2 members) waits for sample 3 for longer than events are kept: "
        "no generator has begun it"
    )


def test_a_sealed_trajectory_awaits_its_reward(starved: Starved) -> None:
    group = replace(GROUP, awaited=(REWARD,))

    found = the(ReasonKind.REWARD_AWAITED, starved(groups=(group,)))

    assert found.sentence == (
        "group g (1 of 2 members) waits for the reward of sample 0, which is sealed for 12 s; "
        "its deadline is in 4 s"
    )


def test_untaken_refill_is_named(starved: Starved) -> None:
    found = the(ReasonKind.REFILL_OPEN, starved(refills=(REFILL,)))

    assert found.sentence == (
        "attempt 2 of sample 1 of group g was granted 33 s ago, and no generator takes it"
    )


def test_a_low_pass_rate_says_why_groups_were_dropped(starved: Starved) -> None:
    seen = starved(
        frontier={
            "num_opened_groups": 31,
            "num_live_groups": 19,
            "num_planned_groups": 17,
            "at_plans": "1:0:10,2:5:14",
        },
        untrained=(("filtered: all rewards are equal", 40), ("abandoned: why", 2)),
    )

    found = the(ReasonKind.PASS_RATE_LOW, seen)

    assert found.sentence == (
        "12 of the 20 groups that were decided since step 1 was planned were dropped; "
        "trajectories that ended untrained, of the whole run: "
        "40 x filtered: all rewards are equal, 2 x abandoned: why"
    )


@pytest.mark.parametrize(("dropped", "planned"), [(10, 9), (2, 0)])
def test_half_of_the_groups_and_a_few_groups_say_nothing(
    dropped: int, planned: int, starved: Starved
) -> None:
    numbers = {"num_live_groups": planned + 2, "num_opened_groups": planned + 2 + dropped}
    seen = starved(frontier={**numbers, "num_planned_groups": planned})

    assert ReasonKind.PASS_RATE_LOW not in kinds(seen)


def test_pass_rate_covers_the_last_two_batches(
    starved: Starved,
) -> None:
    fell = {"num_opened_groups": 110, "num_live_groups": 104, "num_planned_groups": 102}
    rose = {"num_opened_groups": 110, "num_live_groups": 12, "num_planned_groups": 10}

    of_fall = the(ReasonKind.PASS_RATE_LOW, starved(frontier={**fell, "at_plans": "1:1:100"}))
    of_rise = kinds(starved(frontier={**rose, "at_plans": "1:98:2,2:98:6"}))

    assert {"dropped": 5, "decided": 8, "since_step": 1}.items() <= of_fall.facts.items()
    assert ReasonKind.PASS_RATE_LOW not in of_rise


def test_finished_run_needs_no_planner(starved: Starved) -> None:
    seen = starved(frontier={"is_closed": True}, num_ready=0, num_waiting=0, planner="")

    (found,) = reasons(seen)

    assert found.kind is ReasonKind.RUN_OVER
    assert found.sentence == "run maze is closed and over: all 2 steps are stepped"


def test_a_closed_run_with_open_groups_waits_for_them(starved: Starved) -> None:
    seen = starved(frontier={"is_closed": True}, most_live_groups=8)

    assert kinds(seen) == [ReasonKind.TOO_FEW_READY, ReasonKind.RUN_CLOSED]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"frontier": {"planned": 3}}, "step 3 is offered"),
        ({"num_ready": 4}, "the 4 groups of step 3 are about to be planned"),
    ],
)
def test_nothing_is_wrong_where_there_is_data(
    changes: dict[str, Any], state: str, starved: Starved
) -> None:
    (found,) = reasons(starved(**changes))

    assert found.kind is ReasonKind.NOTHING_WRONG
    assert found.sentence == f"nothing is wrong: {state}"


def test_last_short_batch_of_a_closed_run_is_about_to_be_planned(starved: Starved) -> None:
    seen = starved(frontier={"is_closed": True}, num_waiting=0)

    assert kinds(seen) == [ReasonKind.NOTHING_WRONG, ReasonKind.RUN_CLOSED]


def test_while_a_batch_is_offered_only_what_has_failed_is_a_reason(starved: Starved) -> None:
    group = replace(GROUP, open_members=(ALIVE, LAPSED), awaited=(REWARD,), not_begun=(3,))
    seen = starved(frontier={"planned": 3}, groups=(group,), refills=(REFILL,))

    assert kinds(seen) == [ReasonKind.MEMBER_LAPSED]


def test_the_most_important_reason_comes_first(starved: Starved) -> None:
    group = replace(GROUP, open_members=(ALIVE, LAPSED), awaited=(REWARD,), not_begun=(3,))
    seen = starved(
        frontier={"num_opened_groups": 100},
        planner="",
        groups=(group,),
        refills=(REFILL,),
        silent=(GONE,),
        most_live_groups=8,
    )

    assert kinds(seen) == [
        ReasonKind.NO_PLANNER,
        ReasonKind.TOO_FEW_READY,
        ReasonKind.GENERATOR_GONE,
        ReasonKind.MEMBER_LAPSED,
        ReasonKind.PASS_RATE_LOW,
        ReasonKind.REWARD_AWAITED,
        ReasonKind.REFILL_OPEN,
        ReasonKind.MEMBER_NOT_BEGUN,
        ReasonKind.MEMBER_OPEN,
        ReasonKind.OUT_OF_CAPACITY,
    ]
