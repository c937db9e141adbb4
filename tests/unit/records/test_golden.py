"""The bytes of every record, as format 0.

Format 0 may still change. Where it does on purpose, print what the failing test shows into the file
under golden/; from format 1 on, a golden file is never edited, only added to.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from testkit import assert_same, config, manifest, sealed, shape, stored_turn
from turnstream.batching.config import GroupFilter
from turnstream.batching.merge.plan import Manifest
from turnstream.batching.scoring.tag_statistics import sum_up
from turnstream.errors import UnknownFormatError
from turnstream.records.configs import decode_config
from turnstream.records.events import decode_event, encode_event
from turnstream.records.manifests import decode_manifest, encode_manifest, manifest_hash
from turnstream.records.turns import decode_turn, encode_turn
from turnstream.types import (
    BatchDue,
    ConfigRevised,
    DeadlineFired,
    Event,
    GroupOpened,
    PlansWithdrawn,
    Purpose,
    RefillGranted,
    RewardPosted,
    RolledBack,
    RunClosed,
    RunFinished,
    RunReopened,
    StoredTurn,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
    VersionAnnounced,
    VersionRun,
)

GOLDEN = Path(__file__).parent / "golden"

WEIGHTS = np.array([0.25, 0.0, 2.0], np.float32)

EVENTS: dict[str, Event] = {
    "group_opened": GroupOpened(group_id="g0", prompt_uid="gsm8k-17", num_samples=8),
    "trajectory_sealed": replace(
        sealed(
            "g0",
            sample=3,
            reward=0.5,
            turns=[shape(2, 3), shape(1, 2, parent=0, shared=5, trained=1)],
            turn_rewards=[0.0, 0.25],
            payload_crcs=[0x01020304, 0xFFFFFFFF],
            version=7,
            has_logprobs=True,
        ),
        reward_components={"format": 0.25, "result": 0.25},
        sampling={"temperature": 0.7},
        tags={"environment": "guessing"},
        metrics={"num_tool_calls": 2.0},
    ),
    "trajectory_abandoned": TrajectoryAbandoned(key=TrajectoryKey("g0", 3), reason="tool died"),
    "trajectory_died": TrajectoryDied(key=TrajectoryKey("g0", 3, 1), reason="turn 2: checksum"),
    "version_announced": VersionAnnounced(
        version=8, step=7, lineage="main", weights_uri="file:///weights/8"
    ),
    "run_closed": RunClosed(reason="enough"),
    "group_opened_with_spares": GroupOpened(
        group_id="g0", prompt_uid="gsm8k-17", num_samples=6, num_needed=4
    ),
    "eval_opened": GroupOpened(
        group_id="g0", prompt_uid="gsm8k-17", num_samples=8, purpose=Purpose.EVAL
    ),
    "deadline_fired": DeadlineFired(
        group_id="g0", awaited=TrajectoryKey("g0", 3, 1), num_refills=2
    ),
    "refill_granted": RefillGranted(key=TrajectoryKey("g0", 3, 1), number=2),
    "reward_posted": RewardPosted(
        key=TrajectoryKey("g0", 3), reward=0.5, reward_components={"format": 0.25}
    ),
    "batch_due": BatchDue(step=7),
    "run_closed_with_carry": RunClosed(reason="enough", leftover="carry"),
    "run_reopened": RunReopened(),
    "run_finished": RunFinished(step=7),
    "rolled_back": RolledBack(step=7),
    "plans_withdrawn": PlansWithdrawn(step=7, dead=(TrajectoryKey("g0", 3, 1),)),
    "config_revised": ConfigRevised(revision=2, step=7),
    "trajectory_of_two_versions": sealed(
        "g0",
        turns=[shape(2, 3), shape(1, 2, parent=0, shared=5, trained=1)],
        turn_versions=[[(None, 1), (7, 2)], [(8, 1)]],
    ),
    "trajectory_with_a_turn_left_out": sealed(
        "g0",
        turns=[
            shape(2, 3),
            shape(0, 2, parent=0, shared=2, trained=0, is_left_out=True),
            shape(1, 2, parent=0, shared=5),
        ],
        turn_versions=[[(7, 3)], [], [(8, 2)]],
    ),
    "trajectory_of_two_states": sealed(
        "g0",
        turns=[shape(2, 3), shape(1, 2, parent=0, shared=5), shape(4, 1)],
        anchors=[0xCE7E7C3D821BD771, None, 0],
    ),
}


def golden_turn() -> StoredTurn:
    turn = stored_turn(
        "de", "FgH", index=2, parent=1, shared=3, logprobs=[-0.5, 0.0, -1.25], rewards=1.0
    )
    return replace(turn, version_runs=(VersionRun(7, 1), VersionRun(None, 1), VersionRun(8, 1)))


def golden_manifest() -> Manifest:
    return replace(manifest("g0", "g1", run="run", step=2), assembly_version=0)


def golden_manifest_with_figures() -> Manifest:
    labels = [({"env": "maze"}, {"turns": 2.0}, 1.0), ({"env": "go"}, {}, None)]
    figures = sum_up((sealed(tags=tags, metrics=m), reward) for tags, m, reward in labels)
    return replace(manifest("g0", run="run", step=2), assembly_version=2, figures=figures)


def golden_masked_manifest() -> Manifest:
    """One whose first trajectory has rows of different weights, whose second is masked."""
    plan = manifest("g0", run="run", step=2)
    first, second = plan.groups[0].trajectories
    row = first.sequences[0]
    members = (
        replace(first, sequences=(row, row._replace(turns=(1,))), weights=(0.75, 0.25)),
        replace(second, sequences=(row._replace(num_trained_tokens=0),), is_masked=True),
    )
    return replace(
        plan,
        assembly_version=1,
        groups=(replace(plan.groups[0], trajectories=members),),
        mini_batches=(replace(plan.mini_batches[0], num_rows=3),),
        masked_versions=(3, 5),
    )


def golden_manifest_by_turns() -> Manifest:
    """One whose first trajectory has an advantage of its only turn."""
    plan = manifest("g0", run="run", step=2)
    first, second = plan.groups[0].trajectories
    members = (replace(first, turn_advantages=(0.75,)), second)
    groups = (replace(plan.groups[0], trajectories=members),)
    return replace(plan, assembly_version=3, groups=groups)


def read_golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / name).read_text())


def assert_golden(name: str, actual: bytes) -> None:
    lines = "\n".join(textwrap.wrap(actual.hex(), 96))
    assert actual == read_golden(name), f"golden/{name} would now be:\n{lines}"


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("turn", golden_turn()),
        ("turn_with_a_call_id", replace(stored_turn("ab", "C"), call_id="chatcmpl-7")),
        ("turn_with_an_anchor", replace(stored_turn("ab", "C"), anchor=0xCE7E7C3D821BD771)),
        (
            "turn_with_weights",
            replace(golden_turn(), token_weights=WEIGHTS),
        ),
    ],
)
def test_turn_has_the_bytes_of_its_format(name: str, turn: StoredTurn):
    record = encode_turn(turn)

    assert record[3] == (0 if turn.token_weights is None else 1)
    assert_golden(f"{name}.hex", record)
    payload_crc = int.from_bytes(record[-4:], "little")
    assert_same(decode_turn(record), replace(turn, payload_crc=payload_crc))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("manifest", golden_manifest()),
        ("manifest_masked", golden_masked_manifest()),
        ("manifest_figures", golden_manifest_with_figures()),
        ("manifest_by_turns", golden_manifest_by_turns()),
    ],
)
def test_manifest_has_the_bytes_of_format_0(name: str, plan: Manifest):
    record = encode_manifest(plan)

    assert_golden(f"{name}.hex", record)
    assert decode_manifest(record) == plan
    if name == "manifest":
        assert manifest_hash(record) == (
            "2d741b723a239925c5e5bf0f43e58dc2866898f09c7b0288d14cbe3903b0bb97"
        )


@pytest.mark.parametrize("name", EVENTS)
def test_event_has_the_bytes_of_its_format(name: str):
    record = encode_event(EVENTS[name])

    assert record[3] == (name == "trajectory_with_a_turn_left_out")
    assert_golden(f"{name}.hex", record)
    assert decode_event(record) == EVENTS[name]


def test_stored_config_of_format_3_is_read_and_of_format_2_refused():
    decoded = decode_config((GOLDEN / "config_3.json").read_text())

    assert decoded == replace(
        config(batch_groups=8, mini_batch_groups=4),
        estimator="rloo",
        error_trajectories="mask",
        masked_reward="leave_out",
        group_filters=(
            GroupFilter(kind="zero_variance"),
            GroupFilter(kind="mean_range", metric="accuracy", low=0.25),
        ),
    )
    # It has drop_zero_variance, and trajectories with an error were trained.
    with pytest.raises(UnknownFormatError, match="format 2; this one reads format 3"):
        decode_config((GOLDEN / "config_2.json").read_text())
