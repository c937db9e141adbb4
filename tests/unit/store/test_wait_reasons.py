"""What holds a generator's wait, from what was read of its run."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream.batching.config import BatchingConfig
from turnstream.errors import WaitKind, WaitReason
from turnstream.store.waits.wait_durations import Lasting
from turnstream.store.waits.wait_facts import MAX_LEASES, MAX_NAMED, HeldMember, WaitFacts
from turnstream.store.waits.wait_reasons import no_refill, reasons_of
from turnstream.types import GroupOpened, Purpose, TrajectoryKey


def member(
    sample: int = 0, *, writer: str = "w", left_s: float = 50.0, deadline_s: float | None = None
) -> HeldMember:
    key = TrajectoryKey("g", sample)
    return HeldMember(key=key, writer=writer, lease_left_s=left_s, deadline_left_s=deadline_s)


def waits(*members: HeldMember, config: dict[str, Any] | None = None, **fields: Any) -> WaitFacts:
    """A run in which nothing holds anybody, but for what is given."""
    usual: dict[str, Any] = {
        "run": "r",
        "config": BatchingConfig(batch_groups=4, mini_batch_groups=4, **(config or {})),
        **dict.fromkeys(("stepped", "planned", "planned_groups", "released"), 0),
        **dict.fromkeys(("num_opened", "num_revised", "session_epoch", "reserved", "stored"), 0),
        **dict.fromkeys(("planned_bytes", "server_used", "server_max"), 0),
        **dict.fromkeys(("prompts_added", "prompts_left", "prompts_given", "num_refills"), 0),
        "estimate": 20_000,
        "num_live": 4,
        "num_open": 0,
        "is_closed": False,
        "paused": None,
        "at_plans": "",
        "planner": "b",
        "planner_left_s": 5.0,
        "newest_version": None,
        "untrained": (),
        "num_leases": len(members),
        "members": members,
    }
    return WaitFacts(**{**usual, **fields})


def kinds(reasons: list[WaitReason]) -> list[str]:
    return [reason.kind for reason in reasons]


def test_run_without_obstacles_has_no_reason() -> None:
    assert reasons_of(waits()) == []
    assert reasons_of(None) == []


def test_a_generator_is_gone_when_all_that_it_holds_has_lapsed() -> None:
    held = [member(0, writer="dead", left_s=-40), member(1, writer="dead", left_s=-30)]
    slow = [member(2, writer="slow", left_s=-5), member(3, writer="slow", left_s=9)]

    found = reasons_of(waits(*held, *slow))

    gone = [reason for reason in found if reason.kind == WaitKind.GENERATOR_GONE]
    assert [reason.facts for reason in gone] == [{"writer": "dead", "open": 2, "silent_s": 30}]
    assert kinds(found) == [WaitKind.GENERATOR_GONE, *[WaitKind.MEMBER_LAPSED] * 3]


def test_no_generator_counts_as_gone_while_leases_are_unread() -> None:
    found = reasons_of(waits(member(left_s=-40), num_leases=MAX_LEASES + 1))

    assert kinds(found) == [WaitKind.MEMBER_LAPSED]


def test_open_members_are_a_reason_only_if_something_waits() -> None:
    written = member(deadline_s=7)

    free, starved = waits(written), waits(written, num_live=1, num_open=1)
    full = waits(written, config={"max_open_groups": 1}, num_live=5, num_open=1)
    given = waits(written, prompts_given=1)

    assert reasons_of(free) == []
    for each in (starved, full, given):
        (found,) = [why for why in reasons_of(each) if why.kind == WaitKind.MEMBER_OPEN]
        assert found.sentence == (
            "sample 0 of group g is written by generator w: lease renewed, 50 s left; "
            "the deadline of its group is in 7 s"
        )


def test_a_bounded_number_of_members_is_named() -> None:
    found = reasons_of(waits(*[member(i, left_s=-1) for i in range(100)]))

    assert kinds(found).count(WaitKind.MEMBER_LAPSED) == MAX_NAMED


def test_no_planner_says_whose_lease_ended() -> None:
    never = reasons_of(waits(planner="", planner_left_s=0.0))
    ended = reasons_of(waits(planner="b1", planner_left_s=-12.0))

    assert [reason.sentence for reason in (*never, *ended)] == [
        "no batcher plans the run",
        "no batcher plans the run: the lease of b1 ended 12 s ago",
    ]


def test_starving_trainer_leaves_its_group_the_room_of_the_store_rule() -> None:
    held = {"config": {"max_bytes": 600_000}, "stored": 600_000}
    train = GroupOpened(group_id="g", prompt_uid="", num_samples=2)
    evaluate = GroupOpened(group_id="g", prompt_uid="", num_samples=2, purpose=Purpose.EVAL)

    starved = reasons_of(waits(num_live=0, **held), group=train)
    fed = reasons_of(waits(**held), group=train)
    evaluated = reasons_of(waits(num_live=0, **held), group=evaluate)

    assert kinds(starved) == [WaitKind.OUT_OF_DATA]
    assert kinds(fed) == [WaitKind.OUT_OF_BYTES]
    assert kinds(evaluated) == [WaitKind.OUT_OF_BYTES]
    assert fed[0].facts["needed"] == 40_000


@pytest.mark.parametrize(("num_samples", "is_full"), [(1, False), (2, True)])
def test_memory_of_the_server_is_counted_for_every_sample(num_samples: int, is_full: bool) -> None:
    group = GroupOpened(group_id="g", prompt_uid="", num_samples=num_samples)

    found = reasons_of(waits(server_max=1_000_000, server_used=770_000), group=group)

    assert kinds(found) == [WaitKind.OUT_OF_BYTES] * is_full


def test_paused_or_closed_run_is_a_reason() -> None:
    paused = reasons_of(waits(paused="the judge is down"))
    closed = reasons_of(waits(is_closed=True, num_live=0))

    assert [(why.kind, why.sentence) for why in (*paused, *closed)] == [
        (WaitKind.RUN_PAUSED, "the run is paused: the judge is down"),
        (WaitKind.RUN_CLOSED, "the run takes no new group"),
    ]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "the run grants none: its deadline_policy is 'drop'"),
        (
            {"num_refills": 2},
            "the 2 attempts that were granted are tried by others, or here",
        ),
        (
            {
                "num_open": 1,
                "config": {"deadline_policy": "refill", "max_refills": 1, "group_deadline_s": 9},
            },
            "1 groups are open, and no attempt of any was granted",
        ),
    ],
)
def test_a_wait_for_a_refill_says_whether_the_run_grants_any(
    fields: dict[str, Any], sentence: str
) -> None:
    first = no_refill(waits(**fields), waited_s=3.0)[0]

    assert (first.kind, first.sentence, first.facts["waited_s"]) == ("no_refill", sentence, 3.0)


def test_every_reason_that_lasts_says_for_how_long() -> None:
    lasting = Lasting(trainer_s=95.2, step_s=40.0, opened_s=130.0)
    full = {"config": {"max_open_groups": 1}, "num_open": 1}
    planned, lacks = (
        "step 1 is planned and not stepped",
        "step 1 waits for 40 s: 0 of 4 groups ready",
    )

    trainer = reasons_of(waits(planned=1, lasting=lasting, behind=(2,)))
    (live,) = reasons_of(waits(num_live=99, lasting=lasting))
    (opened,) = reasons_of(waits(num_live=5, lasting=lasting, **full))
    few = reasons_of(waits(num_live=1, num_open=1, lasting=lasting))
    none = reasons_of(waits(num_live=0, lasting=lasting))

    assert [(why.sentence, why.facts["since_s"]) for why in (*trainer, *few, *none)] == [
        (f"{planned}; no trainer session has begun for 95 s; dp_rank 2 did not ask for it", 95.2),
        (f"{lacks}, 1 open", 40.0),
        (f"{lacks}, and no generator has a group open; the last was opened 130 s ago", 40.0),
    ]
    for why in (live, opened):
        assert why.sentence.endswith("; the last was opened 130 s ago")
        assert why.facts["since_s"] == 130.0
