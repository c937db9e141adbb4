"""Manifests as records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from testkit import manifest
from testkit.strategies import manifests
from turnstream.batching.merge.plan import Manifest
from turnstream.errors import CorruptRecordError
from turnstream.records.encoding import MANIFEST, read_header, write_frame
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


def with_member(
    *, num_rows: int = 1, row: dict[str, Any] | None = None, **changes: Any
) -> Manifest:
    """Return a manifest whose first trajectory has so many rows and these changes."""
    plan = manifest("g0")
    first, *others = plan.groups[0].trajectories
    sequences = (first.sequences[0]._replace(**(row or {})),) * num_rows
    members = (replace(first, sequences=sequences, **changes), *others)
    return replace(
        plan,
        groups=(replace(plan.groups[0], trajectories=members),),
        mini_batches=(replace(plan.mini_batches[0], num_rows=num_rows + 1),),
    )


def with_mini_batches(*changes: dict[str, int]) -> Manifest:
    """Return a manifest of two groups with these mini-batches."""
    plan = manifest("g0", "g1")
    return replace(plan, mini_batches=tuple(replace(plan.mini_batches[0], **c) for c in changes))


@pytest.mark.parametrize(
    ("reason", "plan"),
    [
        ("2 weights for 3 rows", with_member(num_rows=3, weights=(0.5, 0.25))),
        ("2 advantages for 1 turns", with_member(turn_advantages=(0.5, 0.25))),
        ("a prompt of 3 and 3 trained", with_member(row={"prompt_length": 3})),
        ("has no mini-batch", with_mini_batches()),
        ("first_group", with_mini_batches({"first_group": 1, "num_groups": 1, "num_rows": 2})),
        ("num_rows", with_mini_batches({"num_rows": 3})),
        ("where its groups say", with_mini_batches({"num_groups": 3})),
        ("hold 1 of 2 groups", with_mini_batches({"num_groups": 1, "num_rows": 2})),
        (
            "first_row_id",
            with_mini_batches(
                {"num_groups": 1, "num_rows": 2},
                {"first_group": 1, "num_groups": 1, "num_rows": 2, "first_row_id": 3},
            ),
        ),
    ],
)
def test_manifest_that_contradicts_itself_is_refused(reason: str, plan: Manifest):
    record = encode_manifest(plan)

    with pytest.raises(CorruptRecordError, match=reason):
        decode_manifest(record)
