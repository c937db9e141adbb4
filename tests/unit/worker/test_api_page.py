"""The page of the public API lists every tensor, loss and correction as the code has it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import testkit
from turnstream.types import MiniBatch, Ragged
from turnstream.worker import corrections, losses, policy_losses
from turnstream.worker.layouts import jagged_to_torch, packed_to_torch, right_padded_to_torch
from turnstream.worker.tensors import to_torch

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")

EVERY_LAYOUT = "### Every layout"
LAYOUTS = {
    "### `mini_batch.to_torch()`: left-padded": to_torch,
    "### `mini_batch.to_torch_right_padded()`": right_padded_to_torch,
    "### `mini_batch.to_torch_packed()`": lambda mini_batch: packed_to_torch(mini_batch)[0],
    "### `mini_batch.to_torch_jagged()`": jagged_to_torch,
}
SYNONYMS = {"trained_tokens", "advantages", "logprobs", "token_weights"}
LOGPROBS_OF_MODELS = {
    *("response_logprobs", "next_token_logprobs", "token_logprobs", "token_entropies")
}
LOSSES = (losses, policy_losses)
TOOLS = {"log_ratio", "clipped_exp", "sum_over_row", "mean_over_row", "masked"}
"""Functions that losses and corrections share: no loss by themselves."""


def table(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its first two lines."""
    section = re.split(r"\n#+ ", PAGE.partition(f"\n{heading}\n")[2])[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def tensors_of(value: Any) -> dict[str, Tensor]:
    """Return the tensors of a layout: its fields and its properties, each under one name."""
    properties = [
        name for name, each in inspect.getmembers(type(value)) if isinstance(each, property)
    ]
    names = [*(field.name for field in fields(value)), *properties]
    values = {name: getattr(value, name) for name in names if name not in SYNONYMS}
    return {name: each for name, each in values.items() if isinstance(each, Tensor)}


@pytest.mark.parametrize("heading", LAYOUTS)
def test_api_page_lists_the_tensors_of_every_layout(heading: str) -> None:
    rows = testkit.rows("abcdeFGH", "abC")
    ones = Ragged(np.ones(len(rows.loss_mask.values), np.float32), rows.loss_mask.offsets)
    rows = replace(rows, token_weights=ones, logprobs=ones)
    info = testkit.mini_batch_info(rows)
    value = LAYOUTS[heading](MiniBatch(rows=rows, info=info))
    found = tensors_of(value)
    sizes = {"B": 2, "T": 8, "R": 3, "N": 11, "M": 4}

    listed = table(EVERY_LAYOUT) + table(heading)

    assert {cells[0].strip("`") for cells in listed} == found.keys()
    for name, dtype, shape, meaning in listed:
        tensor = found[name.strip("`")]
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", eval(shape, sizes))
        assert meaning


def functions(module: ModuleType) -> dict[str, inspect.Signature]:
    found = inspect.getmembers(module, inspect.isfunction)
    return {
        name: inspect.signature(each)
        for name, each in found
        if each.__module__ == module.__name__ and not name.startswith("_")
    }


def parameters_of(signature: inspect.Signature) -> list[tuple[str, object]]:
    return [(each.name, each.default) for each in signature.parameters.values()]


@pytest.mark.parametrize(
    ("heading", "modules", "others"),
    [
        ("## Losses", LOSSES, LOGPROBS_OF_MODELS | TOOLS),
        ("## Corrections", (corrections,), set[str]()),
    ],
    ids=["losses", "corrections"],
)
def test_api_page_lists_every_loss_with_its_signature(
    heading: str, modules: Sequence[ModuleType], others: set[str]
) -> None:
    found = {name: each for module in modules for name, each in functions(module).items()}
    sources = "".join(map(inspect.getsource, modules))

    listed = {cells[0].strip("`"): cells for cells in table(heading)}

    assert others <= found.keys()
    assert listed.keys() == found.keys() - others
    for name, (_, meaning, parameters, source) in listed.items():
        written = [as_parameter(each) for each in re.findall(r"`([^`]*)`", parameters)]
        assert written == parameters_of(found[name]), name
        assert meaning
        assert set(re.findall(r"arXiv:[0-9.]*[0-9]", source)) <= set(
            re.findall(r"arXiv:[0-9.]*[0-9]", sources)
        )


def as_parameter(written: str) -> tuple[str, object]:
    """Return the name and the value of a default: 3e-4 and 0.0003 are the same."""
    name, has_default, value = written.partition("=")
    return name, eval(value, {"inf": float("inf")}) if has_default else inspect.Parameter.empty
