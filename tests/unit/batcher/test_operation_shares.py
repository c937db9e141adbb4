"""Training calls of a model are divided among ranks: each datum once, equal work on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.training.operations import make_bodies, make_operation
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
NamedRow = tuple[int, str, int, list[Any], list[Any]]


def shares_of(
    operations: Sequence[Operation], *, dp_world_size: int, skipped: Sequence[int] = ()
) -> list[list[Share]]:
    """Return the decoded shares by rank, which have the same bytes each time they are cut."""
    bodies = make_bodies(operations, first=FIRST)
    taken = {number: body for number, body in bodies.items() if number not in skipped}
    cut, again = (
        cut_operations(MODEL, taken, first=FIRST, dp_world_size=dp_world_size) for _ in range(2)
    )
    shares: list[list[Share]] = [[] for _ in range(dp_world_size)]
    for rank, own in enumerate(shares):
        for index, each in enumerate(cut.passes):
            encoded = encode_operation_share(cut, index=index, dp_rank=rank)
            assert encoded == encode_operation_share(again, index=index, dp_rank=rank)
            loss = OperationLoss(name=each.loss, settings=each.settings)
            own.append((decode_mini_batch(encoded.data), loss))
    return shares


def named_rows(
    shares: Sequence[Sequence[Share]],
) -> list[NamedRow]:
    """Return row id, request id, datum index, tokens and targets of the real rows of all ranks."""
    found: list[NamedRow] = []
    for mini_batch, _ in (share for rank in shares for share in rank):
        rows, operations = mini_batch.rows, mini_batch.rows.operations
        assert operations is not None
        found += [
            (
                int(rows.row_id[row]),
                operations.request_id[row],
                int(operations.datum_index[row]),
                rows.input_ids[row].tolist(),
                operations.target_ids[row].tolist(),
            )
            for row in np.flatnonzero(~rows.is_padding).tolist()
        ]
    return sorted(found)


@given(runs, worlds)
def test_every_datum_is_on_one_rank_once_with_equal_work_and_bytes(
    operations: list[Operation], dp_world_size: int
) -> None:
    shares = shares_of(operations, dp_world_size=dp_world_size)

    data = [
        (
            f"{MODEL}:{FIRST + place}",
            index,
            datum.model_input.tolist(),
            datum.target_tokens.tolist(),
        )
        for place, operation in enumerate(operations)
        for index, datum in enumerate(operation.data)
    ]
    assert named_rows(shares) == [(row_id, *datum) for row_id, datum in enumerate(data)]
    check_work(shares)
    for rank in shares:
        for mini_batch, loss in rank:
            check_tensors(mini_batch, loss)


def check_work(shares: Sequence[Sequence[Share]]) -> None:
    """Check that the ranks have equal counts, and tokens within the bound."""
    assert len({len(rank) for rank in shares}) == 1
    for of_pass in zip(*shares, strict=True):
        batches = [mini_batch for mini_batch, _ in of_pass]
        assert len({len(each.rows) for each in batches}) == 1
        assert len({len(each.info.micro_batches) for each in batches}) == 1
        tokens = [int(each.rows.input_ids.lengths.sum()) for each in batches]
        longest = max(int(each.rows.input_ids.lengths.max()) for each in batches)
        assert max(tokens) <= sum(tokens) / len(tokens) + longest


def check_tensors(mini_batch: MiniBatch, loss: OperationLoss) -> None:
    """Check the tensors of a share, which may have inert rows alone, for its loss."""
    parts = operation_tensors(mini_batch)
    needed = LOSS_INPUTS[loss.name]
    for part in parts:
        assert "advantages" not in needed or part.advantages_N is not None
        assert "logprobs" not in needed or part.logprobs_N is not None
        assert "sequence_ratio_mask" not in needed or part.ratio_mask_N is not None
        for row in (row for row, row_id in enumerate(part.row_ids) if row_id < 0):
            weights_NK = part.weights_NK[part.bounds[row] : part.bounds[row + 1]]
            assert weights_NK.shape[0] == INERT_LENGTH
            assert not weights_NK.any()
    assert sum(len(part.row_ids) for part in parts) == len(mini_batch.rows)


def test_skipped_command_has_no_rows() -> None:
    operations = [make_operation(2), make_operation(3), make_operation(4)]

    shares = shares_of(operations, dp_world_size=2, skipped=[FIRST + 1])

    assert [each[:2] for each in named_rows(shares)] == [
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
