"""Names, numbers and short arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from testkit.plans import sealed
from turnstream.batching.scoring.tag_statistics import sum_up
from turnstream.types import TrajectoryKey


def _ordered(values: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(values.items()))


names = st.text(min_size=1, max_size=8)
versions = st.integers(0, 2**40)
optional_versions = st.none() | versions
rewards_of_trajectories = st.floats(-1e6, 1e6)
floats32 = st.floats(-1e6, 1e6, width=32)
weights_of_tokens = st.sampled_from([0.0, 0.25, 1.0]) | st.floats(0, 1e6, width=32)
logprobs_of_tokens = st.floats(-50, 0, width=32)
numbers_by_name = st.dictionaries(names, st.floats(allow_nan=False), max_size=3).map(_ordered)
texts_by_name = st.dictionaries(names, st.text(max_size=5), max_size=3).map(_ordered)
crcs = st.integers(0, 2**32 - 1)
anchors = st.none() | st.integers(0, 2**64 - 1)
keys = st.builds(TrajectoryKey, names, st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
labelled = st.builds(
    lambda tags, metrics: replace(sealed(), tags=tags, metrics=metrics),
    texts_by_name,
    numbers_by_name,
)
figures = st.lists(st.tuples(labelled, st.none() | rewards_of_trajectories), max_size=3).map(sum_up)
"""Statistics of the tags and metrics of some trajectories."""


def tokens(min_size: int = 0, max_size: int = 6) -> st.SearchStrategy[NDArray[np.int32]]:
    """int32 token ids out of three."""
    ids = st.lists(st.integers(1, 3), min_size=min_size, max_size=max_size)
    return ids.map(lambda values: np.array(values, np.int32))


def exactly(num: int, values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=num, max_size=num)


def masks(num_tokens: int) -> st.SearchStrategy[NDArray[np.uint8]]:
    return exactly(num_tokens, st.integers(0, 1)).map(lambda values: np.array(values, np.uint8))


def floats(num: int, values: st.SearchStrategy[float]) -> st.SearchStrategy[NDArray[np.float32]]:
    return exactly(num, values).map(lambda numbers: np.array(numbers, np.float32))


def masked(
    values: st.SearchStrategy[NDArray[np.float32]], loss_mask: NDArray[np.uint8] | None
) -> st.SearchStrategy[NDArray[np.float32]]:
    """These values, 0.0 wherever the mask, if any, is 0."""
    if loss_mask is None:
        return values
    return values.map(lambda numbers: np.where(loss_mask, numbers, np.float32(0)))
