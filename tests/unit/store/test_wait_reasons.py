"""Reasons for waiting, from the state of a run, and the page that shows each of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testkit import turn
from testkit.runs.snapshots import scanned, snapshot
from turnstream.errors import WaitKind, WaitReason
from turnstream.generator.encode.encoder import TrajectoryDraft
from turnstream.generator.outbox.waits import no_space, not_on_disk, of_writes
from turnstream.generator.outbox.writes import PendingTurn, TrajectoryQueue
from turnstream.store.run.tasks import PromptCounts
from turnstream.store.waits.awaited import (
    admission_awaited,
    batcher_away,
    no_refill,
    no_task,
    no_version,
    not_acknowledged,
    not_ready,
    store_away,
)
from turnstream.store.waits.wait_reasons import reasons
from turnstream.store.waits.wait_snapshot import (
    MAX_NAMED,
    Durations,
    KeptDeadLetters,
    LapsedWriter,
    MemberState,
    WaitingMember,
    WaitSnapshot,
    lapsed_writers,
    open_member,
)
from turnstream.store.waits.wait_warnings import WaitWarnings
from turnstream.types import GroupOpened, Purpose, TrajectoryKey

PAGE = Path(__file__).parents[3] / "docs/waits.md"

KEY = TrajectoryKey("g6", 2)
OF_GROUP: dict[str, Any] = {"since_s": 95.0, "num_sealed": 7, "num_needed": 8}
ALIVE = replace(open_member(KEY, "gen-3", left_ms=55_000), **OF_GROUP)
LAPSED = replace(open_member(KEY, "gen-3", left_ms=-40_000), deadline_left_s=25.0, **OF_GROUP)
UNREWARDED = WaitingMember(key=KEY, state=MemberState.UNREWARDED, **OF_GROUP)
NOT_STARTED = WaitingMember(key=KEY, state=MemberState.NOT_STARTED, **OF_GROUP)
GRANTED = WaitingMember(key=TrajectoryKey("g6", 2, 1), state=MemberState.GRANTED, since_s=30.0)
GONE = LapsedWriter(writer="gen-3", num_open=4, silent_s=40.0)
BATCHER = "host:812:9f3c21aa"
FED: dict[str, Any] = {"planned": 5}
"""The trainer has a step, and waits for nothing."""
FULL = {"used": 52_428_900, "allowed": 52_428_800}
HELD = {"reserved": 39_321_600, "stored": 1_048_576, "planned": 4_194_304}
SMALL = {"batch_groups": 8, "mini_batch_groups": 8, "max_bytes": 200_000}


def of(**changes: Any) -> WaitSnapshot:
    """Return a run that trains steps of 8 groups and waits for step 5, as `why` sees it."""
    usual: dict[str, Any] = {
        "config": {"batch_groups": 8, "mini_batch_groups": 8},
        "stepped": 4,
        "planned": 4,
        "num_live": 40,
        "num_open": 3,
        "num_ready": 6,
        "num_waiting": 2,
        "session_epoch": 3,
        "durations": Durations(trainer_s=95.0, step_s=95.0, opened_s=120.0),
    }
    usual |= changes
    return scanned(**{"planned_groups": 8 * usual["planned"], **usual})


STARVED = WaitKind.TOO_FEW_READY
STATES: list[tuple[dict[str, Any], list[WaitKind]]] = [
    ({}, [STARVED]),
    ({"num_waiting": 0, "newest_version": 4}, [STARVED]),
    ({"num_waiting": 0, "prompts": PromptCounts(num_added=500, num_filtered=20)}, [STARVED] * 2),
    ({"prompts": PromptCounts(num_added=9, num_left=1)}, [STARVED]),
    ({"prompts": PromptCounts(num_added=9, num_given=1)}, [STARVED]),
    ({"num_ready": 8}, [WaitKind.NOTHING_WRONG]),
    (FED, [WaitKind.NOTHING_WRONG]),
    ({"planned": 6, "behind": (1, 3)}, [WaitKind.TRAINER_NOT_STEPPED]),
    ({"planned": 6, "session_epoch": 0}, [WaitKind.TRAINER_NOT_STEPPED]),
    ({"store_trouble": "its disk is full"}, [WaitKind.STORE_AWAY, STARVED]),
    ({**FED, "planner": BATCHER, "planner_left_s": -25.0}, [WaitKind.BATCHER_AWAY]),
    ({**FED, "planner": BATCHER, "planning_trouble": "it is damaged"}, [WaitKind.PLANNING_FAILS]),
    ({**FED, "planner": BATCHER, "release_trouble": "no space"}, [WaitKind.RELEASE_FAILS]),
    ({"paused": "the judge is down"}, [WaitKind.RUN_PAUSED, STARVED]),
    ({**FED, "damage": (5, "step 5: damaged")}, [WaitKind.PAYLOAD_DAMAGED]),
    ({"damage": (5, "step 5: damaged")}, [STARVED]),
    ({"stepped": 5, **FED, "damage": (5, "step 5: damaged")}, [STARVED]),
    ({**FED, "num_flat_groups": 8}, [WaitKind.NO_SIGNAL]),
    ({"num_unsealed": 3}, [STARVED, WaitKind.NO_SIGNAL]),
    ({**FED, "num_unsealed": 3, "members": (ALIVE, GRANTED)}, [WaitKind.NOTHING_WRONG]),
    ({**FED, "members": (ALIVE, LAPSED, NOT_STARTED)}, [WaitKind.GENERATOR_GONE]),
    (
        {"num_live": 48, "members": (ALIVE,)},
        [STARVED, WaitKind.MEMBER_OPEN, WaitKind.OUT_OF_CAPACITY],
    ),
    ({"num_live": 47}, [STARVED]),
    ({"num_live": 48, "stepped": 5, **FED, "announced": 4}, [STARVED, WaitKind.OUT_OF_CAPACITY]),
    ({"num_live": 48, "stepped": 5, **FED, "announced": 5}, [STARVED]),
    ({**FED, "budget": FULL}, [WaitKind.STORE_FULL]),
    ({**FED, "released": 3, "unseen_by": "'a'"}, [WaitKind.NOTHING_WRONG, WaitKind.RELEASE_FAILS]),
    ({"is_closed": True}, [STARVED, WaitKind.RUN_CLOSED]),
    ({"is_closed": True, "num_waiting": 0}, [WaitKind.NOTHING_WRONG, WaitKind.RUN_CLOSED]),
    ({"is_closed": True, "num_waiting": 0, "num_ready": 0, "planner": ""}, [WaitKind.RUN_CLOSED]),
]
"""States of a run, and the kinds of its reasons, the most important first."""


def kinds(seen: WaitSnapshot, **asked: Any) -> list[str]:
    return [reason.kind for reason in reasons(seen, **asked)]


@pytest.mark.parametrize(("changes", "expected"), STATES)
def test_reasons_of_a_state_by_importance(
    changes: dict[str, Any], expected: list[WaitKind]
) -> None:
    assert kinds(of(**changes)) == expected


def test_generator_gets_no_reason_without_an_obstacle() -> None:
    assert reasons(None) == []
    assert reasons(snapshot(num_ready=4)) == []
    assert kinds(snapshot(planned=3)) == [WaitKind.TRAINER_NOT_STEPPED]


def test_open_samples_are_a_reason_only_if_something_waits_for_them() -> None:
    fed: dict[str, Any] = {"members": (ALIVE,), "num_ready": 4}

    assert kinds(snapshot(**fed)) == []
    for waits in (
        snapshot(members=(ALIVE,)),
        snapshot(**fed, num_open=1, config={"max_open_groups": 1}),
        snapshot(**fed, prompts=PromptCounts(num_given=1)),
    ):
        assert WaitKind.MEMBER_OPEN in kinds(waits)


def test_every_obstacle_at_once_comes_by_importance() -> None:
    members = (ALIVE, NOT_STARTED, GRANTED, UNREWARDED, LAPSED)
    seen = of(
        num_opened=200,
        num_live=48,
        planner="",
        store_trouble="its disk is full",
        members=members,
        lapsed_writers=(GONE,),
    )

    found = reasons(seen)

    assert [each.kind for each in found] == [
        *(WaitKind.STORE_AWAY, WaitKind.BATCHER_AWAY, STARVED),
        *(WaitKind.GENERATOR_GONE, WaitKind.GENERATOR_GONE, WaitKind.NO_SIGNAL),
        *[WaitKind.MEMBER_OPEN] * 4,
        WaitKind.OUT_OF_CAPACITY,
    ]
    states = [each.facts["state"] for each in found if "state" in each.facts]
    assert states == ["lapsed", "unrewarded", "granted", "not_started", "open"]


def test_generator_is_gone_when_all_its_leases_have_lapsed() -> None:
    dead = [replace(LAPSED, writer="dead", lease_left_s=left_s) for left_s in (-40.0, -30.0)]
    slow = [replace(LAPSED, writer="slow"), replace(ALIVE, writer="slow")]
    many = [replace(LAPSED, writer=f"w{number}") for number in (*range(MAX_NAMED + 2), 5)]

    assert lapsed_writers([*dead, *slow]) == (
        LapsedWriter(writer="dead", num_open=2, silent_s=30.0),
    )
    assert [each.num_open for each in lapsed_writers(many)] == [2, *[1] * (MAX_NAMED - 1)]


@pytest.mark.parametrize(
    ("changes", "is_low"),
    [
        ({"num_opened": 21, "num_live": 11, "planned_groups": 9}, False),  # 10 of 20 were dropped
        ({"num_opened": 4, "num_live": 2, "planned_groups": 0}, False),  # too few were decided
        ({"num_opened": 110, "num_live": 104, "planned_groups": 102, "at_plans": "1:1:100"}, True),
        ({"num_opened": 110, "num_live": 12, "planned_groups": 10, "at_plans": "1:98:2"}, False),
    ],
)
def test_pass_rate_covers_the_last_two_batches(changes: dict[str, Any], is_low: bool) -> None:
    assert (WaitKind.NO_SIGNAL in kinds(scanned(**changes))) == is_low


@pytest.mark.parametrize(
    ("budget", "num_reasons"),
    [
        ({"planned": 1_000_000}, 0),
        ({"planned": 100_000, "max_bytes": 120_000}, 0),
        ({"planned": 100_001, "max_bytes": 120_000}, 1),
        ({"planned": 120_001, "max_bytes": 120_000}, 2),
        ({"used": 780_000, "allowed": 1_000_000}, 0),
        ({"used": 780_001, "allowed": 1_000_000}, 1),
        ({"used": 770_000, "reserved": 10_001, "allowed": 1_000_000}, 1),
    ],
)
def test_bytes_are_a_reason_if_no_usual_group_may_start(
    budget: dict[str, int], num_reasons: int
) -> None:
    found = kinds(scanned(planned=3, budget=budget))

    assert found == ([WaitKind.OUT_OF_BYTES] * num_reasons or [WaitKind.NOTHING_WRONG])


def test_bytes_are_counted_by_the_rule_of_the_group() -> None:
    held: dict[str, Any] = {"budget": {"stored": 600_000, "max_bytes": 600_000}}
    memory: dict[str, Any] = {"num_ready": 4, "budget": {"allowed": 1_000_000, "used": 770_000}}
    train = GroupOpened(group_id="g", prompt_uid="", num_samples=2)
    evaluate, single = replace(train, purpose=Purpose.EVAL), replace(train, num_samples=1)

    assert kinds(snapshot(**held), group=train) == [STARVED]
    assert kinds(snapshot(num_ready=4, **held), group=train) == [WaitKind.OUT_OF_BYTES]
    assert kinds(snapshot(**held), group=evaluate) == [WaitKind.OUT_OF_BYTES]
    assert kinds(snapshot(**memory), group=train) == [WaitKind.OUT_OF_BYTES]
    assert kinds(snapshot(**memory), group=single) == []
    for used, is_short in ((880_000, False), (880_001, True)):
        seen = scanned(budget={"used": used, "allowed": 1_000_000})
        assert (WaitKind.OUT_OF_BYTES in kinds(seen)) == is_short


def test_unknown_values_are_left_out_of_sentences() -> None:
    seen = snapshot(num_waiting=0, planner="", members=(replace(GRANTED, since_s=0.0),))

    planner, starved, granted = (each.sentence for each in reasons(seen))
    assert planner == "no batcher plans the run"
    assert starved == (
        "step 3: 1 of 4 groups ready, and no generator has a group open; "
        "no policy version was announced"
    )
    assert granted.endswith("of group g6 was granted 0 s ago, and no generator takes it")


def of_page() -> list[WaitReason]:
    """Return the reasons of the examples on the page."""
    queue = TrajectoryQueue(KEY, KEY.trajectory_id, epoch=1)
    queue.num_acknowledged = 3
    queue.pending.append(PendingTurn(TrajectoryDraft(KEY).add(turn("a", "B")), None))
    opened = GroupOpened(group_id="g7", prompt_uid="", num_samples=8)
    refused = "Error 111 connecting to 10.0.0.7:6379. Connection refused."
    store: dict[str, Any] = {"address": "10.0.0.7:6379", "since_s": 12.0}
    batcher: dict[str, Any] = {"address": "10.0.0.8:7600", "since_s": 12.0}
    damage = "step 5: damaged payload of g6/2/0: its checksum differs"
    old = {"num_opened": 116, "num_live": 36, "planned_groups": 28, "at_plans": "3:10:24,4:40:28"}
    retained: dict[str, Any] = {"planned": 6, "released": 4}
    archive = "step 3 is not archived: [Errno 28] No space left on device"
    audit = "'audit' has seen step 3, and expires in 540 s"
    states = [
        *(of(**changes) for changes, _ in STATES),
        of(store_trouble="the store refuses writes: its last write to the disk failed"),
        of(members=(UNREWARDED, GRANTED, NOT_STARTED)),
        of(lapsed_writers=(GONE,), members=(LAPSED,), budget={**FULL, **HELD}),
        of(**old, untrained=(("filtered", 560),)),
        of(released=3, unseen_by=audit),
        of(stepped=5, **FED, announced=4, num_live=48, durations=Durations(step_s=2.0)),
        of(**retained, budget={"stored": 48_211, "planned": 150_000}, config=SMALL),
        of(**retained, budget={"planned": 150_000}, config={**SMALL, "max_bytes": 100_000}),
        of(**FED, planner=BATCHER, planning_trouble="the snapshot is damaged"),
        of(**FED, planner=BATCHER, release_trouble=archive),
        of(**FED, damage=(5, damage)),
        of(num_flat_groups=8),
        of(
            dead=KeptDeadLetters(
                1, 2, "event 1700000000123-0", "the entry of an event has no field r"
            )
        ),
        of(is_closed=True, planned=300, stepped=300, num_ready=0, num_waiting=0),
    ]
    return [
        *(reason for state in states for reason in reasons(state)),
        admission_awaited(opened, "2 groups are live, 2 are allowed after step 0", waited_s=60),
        no_task("no prompt is left: 2 of 500 are given out and not done", None, waited_s=60)[0],
        no_refill(of(), waited_s=60)[0],
        no_version(4, of(newest_version=4), waited_s=60)[0],
        not_ready("batch", "step 5 of run maze was waited for 600 s"),
        not_acknowledged("step 5 as stepped", waited_s=600),
        *of_writes([queue], None, silent_s=12.0),
        no_space(inflight_bytes=67_107_000, unadmitted_bytes=1_000, max_inflight_bytes=67_108_864),
        not_on_disk(left_s=3.0, keep_s=5.0),
        store_away(**store, why=f"the store cannot be reached: {refused}"),
        store_away(**store),
        batcher_away(**batcher, why="failed to connect to all addresses"),
        batcher_away(**batcher),
    ]


def test_page_explains_every_kind_in_the_words_of_the_code() -> None:
    _, _, text = PAGE.read_text(encoding="utf-8").partition("## Kinds")
    rows = re.findall(r"^\| `(\w+)` \| (?:.*\| )?(.*) \|$", text, re.MULTILINE)

    assert {*rows} <= {(str(each.kind), each.sentence) for each in of_page()}
    assert {kind for kind, _ in rows} == set(WaitKind)


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

    assert (first.kind, first.sentence) == (WaitKind.NOT_READY, sentence)
    assert (first.facts["awaited"], first.facts["waited_s"]) == ("refill", 3.0)


def test_warning_is_due_despite_rounding_of_the_clock() -> None:
    # A wait of 4.999999999999999 s was not due, and its timer of 9e-16 s was set again and again.
    began_s = 4.953396763492209
    warnings = WaitWarnings()
    pause_s = warnings.pause_s(0.0)
    assert pause_s is not None

    waited_s = (began_s + pause_s - 1e-15) - began_s

    assert waited_s < 5.0
    assert warnings.is_due(waited_s)
