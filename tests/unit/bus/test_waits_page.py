"""The page of waits shows the words that somebody who is stuck will see, for every kind."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testkit import turn
from testkit.snapshots import scanned
from turnstream.errors import WaitKind, WaitReason
from turnstream.generator.encode.encoder import TrajectoryDraft
from turnstream.generator.outbox.outbox_waits import no_space, not_on_disk, of_writes
from turnstream.generator.outbox.trajectory_queue import Lane, PendingTurn
from turnstream.store.run.tasks import PromptCounts
from turnstream.store.waits.awaited import (
    admission_awaited,
    no_refill,
    no_task,
    no_version,
    store_away,
    store_silent,
)
from turnstream.store.waits.sentences import wait_reason
from turnstream.store.waits.wait_reasons import reasons
from turnstream.store.waits.wait_snapshot import (
    AwaitedReward,
    Durations,
    KeptDeadLetters,
    LapsedWriter,
    OpenMember,
    WaitingGroup,
    WaitSnapshot,
)
from turnstream.types import GroupOpened, TrajectoryKey

PAGE = Path(__file__).parents[3] / "docs/waits.md"

MEMBER = OpenMember(key=TrajectoryKey("g6", 2), writer="gen-3", lease_left_s=55.0)
GROUP = WaitingGroup(group_id="g6", age_s=95.0, num_sealed=7, num_needed=8)
LAPSED = replace(MEMBER, lease_left_s=-40.0)
REWARD = AwaitedReward(key=TrajectoryKey("g6", 2), since_s=95.0, deadline_left_s=None)
BATCHER = "host:812:9f3c21aa"
DAMAGE = (5, "step 5: damaged payload of g6/2/0: its checksum differs")


def of(**changes: Any) -> WaitSnapshot:
    """Return a run that trains steps of 8 groups and waits for step 5."""
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


SMALL = {"batch_groups": 8, "mini_batch_groups": 8, "max_bytes": 200_000}
MOMENTS = [
    of(groups=(replace(GROUP, open_members=(MEMBER,), not_started=(2,)),), num_live=48),
    of(
        budget={
            "reserved": 39_321_600,
            "stored": 1_048_576,
            "planned": 4_194_304,
            "used": 52_428_900,
            "allowed": 52_428_800,
        },
    ),
    of(store_trouble="the store refuses writes: its last write to the disk failed"),
    of(
        groups=(replace(GROUP, open_members=(LAPSED,), deadline_left_s=25.0),),
        lapsed_writers=(LapsedWriter(writer="gen-3", num_open=4, silent_s=40.0),),
        planner=BATCHER,
        planner_left_s=-25.0,
    ),
    of(
        groups=(replace(GROUP, awaited=(REWARD,)),),
        refills=((TrajectoryKey("g6", 2, 1), 30.0),),
        num_unsealed=3,
        paused="the judge is down",
    ),
    of(
        num_opened=116,
        num_live=36,
        planned_groups=28,
        at_plans="3:10:24,4:40:28",
        untrained=(("filtered", 560),),
    ),
    of(released=3, unseen_by="'audit' has seen step 3, and expires in 540 s"),
    of(
        stepped=5,
        planned=5,
        announced=4,
        num_live=48,
        durations=Durations(trainer_s=2.0, step_s=2.0, opened_s=120.0),
    ),
    of(num_waiting=0, newest_version=4, prompts=PromptCounts(num_added=500, num_filtered=20)),
    of(planned=6, behind=(1, 3)),
    of(planned=5),
    of(planned=6, released=4, budget={"stored": 48_211, "planned": 150_000}, config=SMALL),
    of(
        planned=6,
        released=4,
        budget={"planned": 150_000},
        config={**SMALL, "max_bytes": 100_000},
    ),
    of(planner=BATCHER, planning_trouble="the snapshot is damaged"),
    of(
        planner=BATCHER,
        release_trouble="step 3 is not archived: [Errno 28] No space left on device",
    ),
    of(planned=5, damage=DAMAGE),
    of(num_flat_groups=8),
    of(is_closed=True),
    of(
        dead=KeptDeadLetters(
            num_trajectories=1,
            num_events=2,
            newest="event 1700000000123-0",
            reason="the entry of an event has no field r",
        )
    ),
    of(is_closed=True, planned=300, stepped=300, num_ready=0, num_waiting=0),
]


def of_waits() -> list[WaitReason]:
    """Return the first reason of each wait."""
    opened = GroupOpened(group_id="g7", prompt_uid="", num_samples=8)
    key = TrajectoryKey("g6", 2)
    lane = Lane(key, key.trajectory_id, epoch=1)
    lane.num_acknowledged = 3
    lane.pending.append(PendingTurn(TrajectoryDraft(key).add(turn("a", "B")), None))
    prompts = "no prompt is left: 2 of 500 are given out and not done"
    return [
        admission_awaited(opened, "2 groups are live, 2 are allowed after step 0", waited_s=60),
        no_task(prompts, None, waited_s=60)[0],
        no_refill(of(), waited_s=60)[0],
        no_version(4, of(newest_version=4), waited_s=60)[0],
        wait_reason(WaitKind.NO_BATCH, {"run": "maze", "step": 5, "waited_s": 600}),
        no_space(67_107_000, unadmitted_bytes=1_000, max_inflight_bytes=67_108_864),
        *of_writes([lane], None, silent_s=12.0),
        wait_reason(WaitKind.NOT_ACKNOWLEDGED, {"call": "step 5 as stepped", "waited_s": 600}),
        not_on_disk(left_s=3.0, keep_s=5.0),
    ]


def of_services() -> list[WaitReason]:
    """Return the reasons of a store or a batcher that is away or silent."""
    refused = "Error 111 connecting to 10.0.0.7:6379. Connection refused."
    store: dict[str, Any] = {"address": "10.0.0.7:6379", "since_s": 12.0}
    batcher: dict[str, Any] = {"address": "10.0.0.8:7600", "since_s": 12.0}
    return [
        store_away(f"the store cannot be reached: {refused}", **store),
        store_silent(**store),
        wait_reason(WaitKind.BATCHER_SILENT, batcher),
        wait_reason(
            WaitKind.BATCHER_AWAY, {**batcher, "why": "failed to connect to all addresses"}
        ),
    ]


def said() -> dict[str, set[str]]:
    """Return the sentences of each kind."""
    found = [reason for moment in MOMENTS for reason in reasons(moment)]
    words: dict[str, set[str]] = {}
    for reason in (*of_waits(), *of_services(), *found):
        words.setdefault(str(reason.kind), set()).add(reason.sentence)
    return words


def examples() -> list[tuple[str, str]]:
    _, _, text = PAGE.read_text(encoding="utf-8").partition("## Kinds of waits")
    rows = re.findall(r"^\| (`\w+` \| .*) \|$", text, re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    return [(row[0].strip("`"), row[-1]) for row in cells]


@pytest.mark.parametrize(("kind", "words"), examples())
def test_the_words_on_the_page_are_those_of_the_code(kind: str, words: str) -> None:
    assert words in said()[kind]


def test_the_page_explains_every_kind() -> None:
    assert {kind for kind, _ in examples()} == set(WaitKind)
