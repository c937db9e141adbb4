"""The page of waits shows the words that somebody who is stuck will see, for every kind."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testkit import config, turn
from turnstream.errors import BatcherUnavailableError, WaitKind, WaitReason
from turnstream.generator.encode.encoder import TrajectoryDraft
from turnstream.generator.outbox.outbox_waits import no_room, not_on_disk, of_writes
from turnstream.generator.outbox.trajectory_queue import Lane, PendingTurn
from turnstream.store.run.tasks import PromptCounts
from turnstream.store.waits.wait_durations import Lasting
from turnstream.store.waits.wait_facts import WaitFacts
from turnstream.store.waits.wait_reasons import (
    no_leave,
    no_refill,
    no_task,
    no_version,
    store_away,
    store_silent,
)
from turnstream.types import GroupOpened, TrajectoryKey
from turnstream.worker._reasons import batcher_silent, no_batch, not_acknowledged, of_failure
from turnstream_server.bus.core.frontier import Frontier, PayloadDamage
from turnstream_server.bus.queries.budget import ByteBudget, HeldBytes
from turnstream_server.bus.queries.run_snapshot import (
    AwaitedReward,
    KeptDeadLetters,
    OpenMember,
    OpenRefill,
    RunSnapshot,
    SilentWriter,
    WaitingGroup,
)
from turnstream_server.bus.queries.wait_reasons import reasons

PAGE = Path(__file__).parents[3] / "docs/waits.md"

FRONTIER = Frontier(
    planned=4,
    stepped=4,
    committed=4,
    session_epoch=3,
    session="s",
    dp_world_size=1,
    lineage="main",
    num_opened_groups=40,
    num_live_groups=40,
    is_closed=False,
)
MEMBER = OpenMember(sample=2, attempt=0, writer="gen-3", lease_left_s=55.0)
GROUP = WaitingGroup(group_id="g6", age_s=95.0, num_sealed=7, num_needed=8)
STARVED = RunSnapshot(
    run="maze",
    frontier=FRONTIER,
    planner="p",
    planner_left_s=5.0,
    batch_groups=8,
    max_planned_ahead=1,
    most_live_groups=40,
    num_ready=6,
    num_waiting=2,
    lasting=Lasting(trainer_s=95.0, step_s=95.0, opened_s=120.0),
)
BUDGET = ByteBudget(
    held=HeldBytes(reserved=0, stored=48_211, planned=150_000, estimate=80_000),
    num_kept_steps=2,
    max_bytes=200_000,
    server_used=0,
    server_max=0,
)


def of(**changes: Any) -> RunSnapshot:
    frontier = replace(FRONTIER, **changes.pop("frontier", {}))
    return replace(STARVED, frontier=frontier, **changes)


LAPSED = replace(MEMBER, lease_left_s=-40.0)
REWARD = AwaitedReward(sample=2, attempt=0, since_s=95.0, deadline_left_s=None)
OVER = {"is_closed": True, "is_finished": True, "planned": 300, "stepped": 300}
DAMAGE = PayloadDamage(
    step=5,
    manifest_hash="ab",
    sentence="step 5: damaged payload of g6/2/0: its checksum differs",
)
MOMENTS = [
    of(groups=(replace(GROUP, open_members=(MEMBER,), not_begun=(2,)),)),
    of(
        budget=replace(
            BUDGET,
            held=HeldBytes(
                reserved=39_321_600, stored=1_048_576, planned=4_194_304, estimate=80_000
            ),
            server_used=52_428_900,
            server_max=52_428_800,
        )
    ),
    of(store_trouble="the store refuses writes: its last write to the disk failed"),
    of(
        groups=(replace(GROUP, open_members=(LAPSED,), deadline_left_s=25.0),),
        silent=(SilentWriter(writer="gen-3", num_open=4, silent_s=40.0),),
        planner="host:812:9f3c21aa",
        planner_left_s=-25.0,
    ),
    of(
        groups=(replace(GROUP, awaited=(REWARD,)),),
        refills=(OpenRefill(group_id="g6", sample=2, attempt=1, since_s=30.0),),
        num_unsealed=3,
        frontier={"paused": "the judge is down"},
    ),
    of(
        frontier={
            "num_opened_groups": 116,
            "num_live_groups": 36,
            "num_planned_groups": 28,
            "at_plans": "3:10:24,4:40:28",
        },
        untrained=(("filtered", 560),),
    ),
    of(
        num_waiting=0,
        newest_version=4,
        prompts=PromptCounts(
            num_added=500, num_left=0, num_given=0, num_trained=480, num_filtered=20
        ),
    ),
    of(frontier={"planned": 5}, most_live_groups=99, max_planned_ahead=0, behind=(1, 3)),
    of(frontier={"planned": 5}, num_waiting=0, most_live_groups=99, max_planned_ahead=1),
    of(frontier={"planned": 5}, budget=BUDGET),
    of(budget=replace(BUDGET, max_bytes=100_000)),
    of(planner="host:812:9f3c21aa", planning_trouble="the snapshot is damaged"),
    of(
        planner="host:812:9f3c21aa",
        release_trouble="step 3 is not archived: [Errno 28] No space left on device",
    ),
    of(frontier={"planned": 5, "damage": DAMAGE}),
    of(frontier={"is_closed": True}),
    of(
        dead=KeptDeadLetters(
            num_trajectories=1,
            num_events=2,
            newest="event 1700000000123-0",
            reason="the entry of an event has no field r",
        )
    ),
    of(frontier=OVER, num_ready=0, num_waiting=0),
]


WAITS = WaitFacts(
    run="maze",
    config=config(),
    stepped=4,
    planned=4,
    planned_groups=0,
    released=0,
    num_live=3,
    num_open=3,
    num_opened=3,
    num_revised=0,
    session_epoch=3,
    is_closed=False,
    paused=None,
    at_plans="",
    planner="p",
    planner_left_s=5.0,
    reserved=0,
    stored=0,
    planned_bytes=0,
    estimate=0,
    server_used=0,
    server_max=0,
    prompts_added=500,
    prompts_left=0,
    prompts_given=2,
    num_refills=0,
    newest_version=4,
    untrained=(),
    num_leases=0,
    members=(),
)


def of_waits() -> list[WaitReason]:
    """What is said first of each wait."""
    opened = GroupOpened(group_id="g7", prompt_uid="", num_samples=8)
    key = TrajectoryKey("g6", 2)
    lane = Lane(key, key.trajectory_id, epoch=1)
    lane.num_acknowledged = 3
    lane.pending.append(PendingTurn(TrajectoryDraft(key).add(turn("a", "B")), None))
    prompts = "no prompt is left: 2 of 500 are given out and not done"
    return [
        no_leave(opened, "2 groups are live, 2 are allowed after step 0", waited_s=60),
        no_task(prompts, None, waited_s=60)[0],
        no_refill(WAITS, waited_s=60)[0],
        no_version(4, WAITS, waited_s=60)[0],
        no_batch("maze", 5, waited_s=600),
        no_room(inflight_bytes=67_107_000, held_bytes=1_000, max_inflight_bytes=67_108_864),
        *of_writes([lane], None, silent_s=12.0),
        not_acknowledged("step 5 as stepped", waited_s=600),
        not_on_disk(left_s=3.0, keep_s=5.0),
    ]


def of_services() -> list[WaitReason]:
    """What is said of a store or a batcher that is away or silent."""
    refused = "Error 111 connecting to 10.0.0.7:6379. Connection refused."
    store: dict[str, Any] = {"address": "10.0.0.7:6379", "since_s": 12.0}
    batcher: dict[str, Any] = {"target": "10.0.0.8:7600", "since_s": 12.0}
    return [
        store_away(f"the store cannot be reached: {refused}", **store),
        store_silent(**store),
        batcher_silent(batcher["target"], since_s=batcher["since_s"]),
        *of_failure(BatcherUnavailableError("failed to connect to all addresses"), **batcher),
    ]


def said() -> dict[str, set[str]]:
    """What is said of each kind."""
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
