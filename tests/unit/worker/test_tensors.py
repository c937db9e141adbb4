from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import testkit
from turnstream.batching.layouts.padded import left_padded
from turnstream.errors import BatchingError
from turnstream.types import MiniBatch
from turnstream.worker.tensors import LeftPaddedTensors, to_torch

ROWS = ("abCd", "aBcDeF", "abcdE", "a|b")
"""Responses "Cd", "BcDeF", "E" and, in an inert row, "b"."""


def build(*texts: str, micro_batches: Any = None, pad_token_id: int = 0) -> MiniBatch:
    chosen = texts or ROWS
    rows = testkit.rows(
        *chosen,
        advantages=[float(b + 1) for b in range(len(chosen))],
        is_padding=[text == "a|b" for text in chosen],
    )
    changes = {} if micro_batches is None else {"micro_batches": micro_batches}
    info = testkit.mini_batch_info(rows, pad_token_id=pad_token_id, **changes)
    return MiniBatch(rows=rows, info=info)


def spelled(part: LeftPaddedTensors) -> list[str]:
    """Every row of tensors as text; "." is padding, capitals are trained."""
    texts = []
    for row in range(len(part.input_ids_BT)):
        letters = [chr(token) for token in part.input_ids_BT[row].tolist()]
        live = part.attention_mask_BT[row].tolist()
        text = ["." if not on else letter for letter, on in zip(letters, live, strict=True)]
        for j, trained in enumerate(part.loss_mask_BR[row].tolist()):
            column = len(text) - part.response_width + j
            text[column] = text[column].upper() if trained else text[column]
        texts.append("".join(text))
    return texts


def named_tensors(part: LeftPaddedTensors) -> dict[str, Tensor]:
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def test_tensors_equal_the_layout_of_the_batching_core() -> None:
    mini_batch = build(pad_token_id=9)
    info = mini_batch.info

    part = to_torch(mini_batch)

    padded = left_padded(
        mini_batch.rows, width=info.width, response_width=info.response_width, pad_token_id=9
    )
    assert part.token_weights_BR is None
    for name in {field.name for field in fields(padded)} - {"extras"}:
        actual, expected = getattr(part, name), getattr(padded, name)
        testkit.assert_same(None if actual is None else actual.numpy(), expected)
    assert torch.equal(part.position_ids_BT, torch.from_numpy(padded.position_ids_BT))


def test_tensors_are_writable_copies_of_read_only_columns() -> None:
    mini_batch = build()
    for column in ("row_id", "weight", "is_padding", "trajectory_num_tokens", "group_num_tokens"):
        getattr(mini_batch.rows, column).flags.writeable = False

    part = to_torch(mini_batch)

    for tensor in named_tensors(part).values():
        tensor[...] = 0
    assert mini_batch.rows.weight.tolist() == [1, 1, 1, 0]


def test_width_is_common_to_all_ranks() -> None:
    mini_batch = build("abC")
    wider = replace(mini_batch, info=replace(mini_batch.info, width=6, response_width=2))

    assert spelled(to_torch(wider)) == ["...abC"]
    assert to_torch(wider).response_width == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_equal_those_on_the_cpu() -> None:
    on_cpu, on_device = to_torch(build()), to_torch(build(), device="cuda")

    for name, tensor in named_tensors(on_device).items():
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu(), named_tensors(on_cpu)[name])


def test_adjacent_rows_are_views_and_others_are_copies() -> None:
    part = to_torch(build(micro_batches=((0, 1), (2, 0))))

    views, copies = part.micro_batches()

    assert views.input_ids_BT.untyped_storage().data_ptr() == (
        part.input_ids_BT.untyped_storage().data_ptr()
    )
    assert copies.input_ids_BT.untyped_storage().data_ptr() != (
        part.input_ids_BT.untyped_storage().data_ptr()
    )


@given(st.data())
def test_micro_batches_hold_every_row_once_with_all_its_tokens(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.from_regex(r"[a-d]{1,6}[E-H]{1,6}", fullmatch=True), min_size=1))
    order = data.draw(st.permutations(range(len(texts))))
    cut = data.draw(st.integers(1, len(texts)))
    plan = tuple(tuple(order[start : start + cut]) for start in range(0, len(order), cut))

    parts = list(to_torch(build(*texts, micro_batches=plan)).micro_batches())

    assert [text.lstrip(".") for part in parts for text in spelled(part)] == [
        texts[row] for row in order
    ]
    assert all(part.attention_mask_BT[:, 0].any() for part in parts)
    assert all(part.response_mask_BR[:, 0].any() for part in parts)


def test_require_logprobs_refuses_a_mini_batch_without_any() -> None:
    mini_batch = build("abC")
    part = to_torch(replace(mini_batch, rows=replace(mini_batch.rows, logprobs=None)))

    assert part.logprobs_BR is None
    with pytest.raises(BatchingError, match="no row"):
        part.require_logprobs()
