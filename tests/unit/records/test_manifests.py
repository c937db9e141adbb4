"""Manifests as records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from testkit import manifest
from testkit.strategies import manifests
from turnstream.batching.merge.plan import Manifest, MiniBatchPlan
from turnstream.errors import CorruptRecordError
from turnstream.records.framing import MANIFEST, read_header, write_frame
from turnstream.records.manifests import decode_manifest, encode_manifest, manifest_hash


@given(plan=manifests())
def test_decoded_manifest_is_the_encoded_one(plan: Manifest):
    assert decode_manifest(encode_manifest(plan)) == plan


def test_unknown_fields_are_ignored_and_part_of_the_hash():
    record = encode_manifest(manifest())
    header = read_header(record, kind=MANIFEST)

    newer = write_frame(MANIFEST, header + b"\x9a\x06\x05newer")

    assert decode_manifest(newer) == manifest()
    assert manifest_hash(newer) != manifest_hash(record)


def weighted(*weights: float, num_rows: int) -> Manifest:
    plan = manifest("g0")
    member = plan.groups[0].trajectories[0]
    rows_of = replace(member, sequences=member.sequences * num_rows, weights=weights)
    group = replace(plan.groups[0], trajectories=(rows_of, *plan.groups[0].trajectories[1:]))
    mini_batches = (replace(plan.mini_batches[0], num_rows=num_rows + 1),)
    return replace(plan, groups=(group,), mini_batches=mini_batches)


def test_another_number_of_weights_than_of_rows_is_refused():
    record = encode_manifest(weighted(0.5, 0.25, num_rows=3))

    with pytest.raises(CorruptRecordError, match="2 weights for 3 rows"):
        decode_manifest(record)


def test_another_number_of_advantages_than_of_turns_is_refused():
    plan = manifest("g0")
    member = replace(plan.groups[0].trajectories[0], turn_advantages=(0.5, 0.25))
    group = replace(plan.groups[0], trajectories=(member, *plan.groups[0].trajectories[1:]))
    record = encode_manifest(replace(plan, groups=(group,)))

    with pytest.raises(CorruptRecordError, match="2 advantages for 1 turns"):
        decode_manifest(record)


def changed(**changes: Any) -> MiniBatchPlan:
    return replace(manifest("g0", "g1").mini_batches[0], **changes)


@pytest.mark.parametrize(
    ("reason", "mini_batches"),
    [
        ("has no mini-batch", []),
        ("first_group", [changed(first_group=1, num_groups=1, num_rows=2)]),
        ("num_rows", [changed(num_rows=3)]),
        ("where its groups say", [changed(num_groups=3)]),
        ("hold 1 of 2 groups", [changed(num_groups=1, num_rows=2)]),
        (
            "first_row_id",
            [
                changed(num_groups=1, num_rows=2),
                changed(first_group=1, num_groups=1, num_rows=2, first_row_id=3),
            ],
        ),
    ],
)
def test_mini_batches_that_skip_or_reorder_groups_are_refused(
    reason: str, mini_batches: list[MiniBatchPlan]
):
    record = encode_manifest(replace(manifest("g0", "g1"), mini_batches=tuple(mini_batches)))

    with pytest.raises(CorruptRecordError, match=reason):
        decode_manifest(record)


def test_row_with_parts_longer_than_itself_is_refused():
    plan = manifest("g0")
    member = plan.groups[0].trajectories[0]
    row = member.sequences[0]._replace(prompt_length=3)
    members = (replace(member, sequences=(row,)), plan.groups[0].trajectories[1])
    groups = (replace(plan.groups[0], trajectories=members),)

    with pytest.raises(CorruptRecordError, match="a prompt of 3 and 3 trained"):
        decode_manifest(encode_manifest(replace(plan, groups=groups)))
