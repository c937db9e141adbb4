"""Training calls of a model are divided among ranks: each datum once, equal work on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.operations import make_bodies, make_operation
from turnstream.batching.rows.operations import LOSS_INPUTS, Operation
from turnstream.batching.rows.plain_rows import INERT_LENGTH
from turnstream.errors import BatchingError, CorruptRecordError
from turnstream.records.batches import decode_mini_batch
from turnstream.types import MiniBatch
from turnstream.worker.operation_tensors import operation_tensors
from turnstream_server.batcher.assembly.operation_shares import (
    FORWARD_TOKENS,
    cut_operations,
    encode_operation_share,
    num_bytes_of_passes,
)
from turnstream_server.trainer.passes import OperationLoss

MODEL = "S:train:0"
FIRST = 7

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=6)
scored = st.builds(
    lambda own, loss: make_operation(*own, loss=loss), lengths, st.sampled_from([*LOSS_INPUTS])
)
several_targets = st.builds(
    lambda own, num: make_operation(*own, num_targets=num), lengths, st.integers(1, 3)
)
runs = st.lists(scored | several_targets, min_size=1, max_size=6)
worlds = st.integers(1, 9)

Share = tuple[MiniBatch, OperationLoss]


def shares_of(
    operations: Sequence[Operation], *, dp_world_size: int, skipped: Sequence[int] = ()
) -> list[list[Share]]:
    bodies = make_bodies(operations, first=FIRST)
    taken = {number: body for number, body in bodies.items() if number not in skipped}
    cut = cut_operations(MODEL, taken, first=FIRST, dp_world_size=dp_world_size)
    return [
        [
            (
                decode_mini_batch(encode_operation_share(cut, index=index, dp_rank=rank).data),
                OperationLoss(name=each.loss, settings=each.settings),
            )
            for index, each in enumerate(cut.passes)
        ]
        for rank in range(dp_world_size)
    ]


def named_rows(shares: Sequence[Sequence[Share]]) -> list[tuple[int, str, int, list[int]]]:
    """Return the real rows of all ranks: row id, request id, datum index and tokens."""
    found: list[tuple[int, str, int, list[int]]] = []
    for mini_batch, _ in (share for rank in shares for share in rank):
        rows, operations = mini_batch.rows, mini_batch.rows.operations
        assert operations is not None
        found += [
            (
                int(rows.row_id[row]),
                operations.request_id[row],
                int(operations.datum_index[row]),
                rows.input_ids[row].tolist(),
            )
            for row in np.flatnonzero(~rows.is_padding).tolist()
        ]
    return sorted(found)


@given(runs, worlds)
def test_every_datum_is_on_one_rank_once_with_its_row_id(
    operations: list[Operation], dp_world_size: int
) -> None:
    shares = shares_of(operations, dp_world_size=dp_world_size)

    data = [
        (f"{MODEL}:{FIRST + place}", index, datum.model_input.tolist())
        for place, operation in enumerate(operations)
        for index, datum in enumerate(operation.data)
    ]
    assert named_rows(shares) == [(row_id, *datum) for row_id, datum in enumerate(data)]


@given(runs, worlds)
def test_ranks_have_equal_counts_and_tokens_within_the_bound(
    operations: list[Operation], dp_world_size: int
) -> None:
    shares = shares_of(operations, dp_world_size=dp_world_size)

    assert len({len(rank) for rank in shares}) == 1
    for of_pass in zip(*shares, strict=True):
        batches = [mini_batch for mini_batch, _ in of_pass]
        assert len({len(each.rows) for each in batches}) == 1
        assert len({len(each.info.micro_batches) for each in batches}) == 1
        tokens = [int(each.rows.input_ids.lengths.sum()) for each in batches]
        longest = max(int(each.rows.input_ids.lengths.max()) for each in batches)
        assert max(tokens) <= sum(tokens) / len(tokens) + longest


@given(runs, worlds)
def test_equal_arguments_have_equal_bytes(operations: list[Operation], dp_world_size: int) -> None:
    cuts = [
        cut_operations(
            MODEL, make_bodies(operations, first=FIRST), first=FIRST, dp_world_size=dp_world_size
        )
        for _ in range(2)
    ]

    for rank in range(dp_world_size):
        for index in range(len(cuts[0].passes)):
            one, other = (encode_operation_share(cut, index=index, dp_rank=rank) for cut in cuts)
            assert one.data == other.data
            assert one.content_hash == other.content_hash


@given(runs, worlds)
def test_every_share_becomes_tensors_of_its_loss(
    operations: list[Operation], dp_world_size: int
) -> None:
    # Many of the ranks have inert rows alone.
    for rank in shares_of(operations, dp_world_size=dp_world_size):
        for mini_batch, loss in rank:
            parts = operation_tensors(mini_batch)

            needed = LOSS_INPUTS[loss.name]
            for part in parts:
                assert "advantages" not in needed or part.advantages_N is not None
                assert "logprobs" not in needed or part.logprobs_N is not None
                assert "sequence_ratio_mask" not in needed or part.ratio_mask_N is not None
                inert = [row for row, row_id in enumerate(part.row_ids) if row_id < 0]
                for row in inert:
                    weights_NK = part.weights_NK[part.bounds[row] : part.bounds[row + 1]]
                    assert weights_NK.shape[0] == INERT_LENGTH
                    assert not weights_NK.any()
            assert sum(len(part.row_ids) for part in parts) == len(mini_batch.rows)


def test_operations_of_one_loss_share_a_pass_in_order_of_commands() -> None:
    operations = [
        make_operation(2, loss="ppo"),
        make_operation(3),
        make_operation(1, 1, loss="ppo"),
        make_operation(4, loss="ppo", clip_low_threshold=0.5),
    ]

    (rank,) = shares_of(operations, dp_world_size=1)

    assert [mini_batch.rows.row_id.tolist() for mini_batch, _ in rank] == [[0, 2, 3], [1], [4]]
    assert [(loss.name, dict(loss.settings)) for _, loss in rank] == [
        ("ppo", {}),
        ("cross_entropy", {}),
        ("ppo", {"clip_low_threshold": 0.5}),
    ]


def test_skipped_command_has_no_rows() -> None:
    operations = [make_operation(2), make_operation(3), make_operation(4)]

    shares = shares_of(operations, dp_world_size=2, skipped=[FIRST + 1])

    assert [(row_id, name) for row_id, name, _, _ in named_rows(shares)] == [
        (0, f"{MODEL}:{FIRST}"),
        (1, f"{MODEL}:{FIRST + 2}"),
    ]


def test_forward_passes_keep_to_the_limit_on_all_ranks() -> None:
    half = FORWARD_TOKENS // 2
    operations = [make_operation(half, half, half, 10, 10), make_operation(FORWARD_TOKENS + 1)]

    shares = shares_of(operations, dp_world_size=2)

    counts = {len(mini_batch.info.micro_batches) for rank in shares for mini_batch, _ in rank}
    assert len(counts) == 1
    for mini_batch, _ in (share for rank in shares for share in rank):
        for rows in mini_batch.info.micro_batches:
            lengths_B = mini_batch.rows.input_ids.lengths[list(rows)]
            assert len(rows) == 1 or len(rows) * lengths_B.max() <= FORWARD_TOKENS


def test_memory_of_passes_counts_the_columns_of_operations() -> None:
    bodies = make_bodies([make_operation(1_000, num_targets=20)])

    passes = cut_operations(MODEL, bodies, first=1, dp_world_size=1)

    assert num_bytes_of_passes(passes) > 1_000 * 20 * (8 + 4)


@pytest.mark.parametrize("damaged", [b"", b"\xff" * 40, make_bodies([make_operation(9)])[1][:60]])
def test_damaged_body_is_an_error_with_its_number(damaged: bytes) -> None:
    bodies = make_bodies([make_operation(2), make_operation(2)]) | {2: damaged}

    with pytest.raises(CorruptRecordError, match=f"command 2 of model '{MODEL}' is no operation"):
        cut_operations(MODEL, bodies, first=1, dp_world_size=1)


def test_operation_that_cannot_be_computed_is_an_error_with_its_name() -> None:
    bodies = make_bodies([Operation(request_id="", loss="ppo", data=make_operation(2).data)])

    with pytest.raises(BatchingError, match=f"operation '{MODEL}:1', datum 0: logprobs is missing"):
        cut_operations(MODEL, bodies, first=1, dp_world_size=1)
