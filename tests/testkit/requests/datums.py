"""Datums of operations with random values, and the form in which `sdk_program.py` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.rows.operations import LOSS_INPUTS

Inputs = dict[str, NDArray[Any]]
"""`model_input`, and loss inputs by their names in the SDK."""

VOCABULARY: Final = 256


def random_datum(rng: np.random.Generator, length: int, *, loss: str = "cross_entropy") -> Inputs:
    """Return a datum of a loss: tokens, targets, and float32 inputs of the loss."""
    datum: Inputs = {
        "model_input": rng.integers(0, VOCABULARY, length),
        "target_tokens": rng.integers(0, VOCABULARY, length),
    }
    if loss == "cross_entropy":
        datum["weights"] = rng.uniform(-1, 2, length).astype(np.float32)
        return datum
    for name in LOSS_INPUTS[loss]:
        datum[name] = rng.normal(size=length).astype(np.float32)
    # Near the log-probability of a random token, so that ratios lie on both sides of the clips.
    datum["logprobs"] = (-np.log(VOCABULARY) + 0.5 * datum["logprobs"]).astype(np.float32)
    if "sequence_ratio_mask" in datum:
        datum["sequence_ratio_mask"] = (np.arange(length) % 3 < 2).astype(np.float32)
    return datum


def random_data(seed: int, lengths: Sequence[int], *, loss: str = "cross_entropy") -> list[Inputs]:
    """Return datums of these lengths."""
    rng = np.random.default_rng(seed)
    return [random_datum(rng, length, loss=loss) for length in lengths]


def as_sent(data: Sequence[Mapping[str, NDArray[Any]]]) -> list[dict[str, Any]]:
    """Return datums as the JSON that `sdk_program.py` reads."""
    return [
        {
            "tokens": datum["model_input"].tolist(),
            "inputs": {
                name: [list(values.shape), _dtype(values), values.ravel().tolist()]
                for name, values in datum.items()
                if name != "model_input"
            },
        }
        for datum in data
    ]


def _dtype(values: NDArray[Any]) -> str:
    return "int64" if values.dtype.kind == "i" else "float32"
