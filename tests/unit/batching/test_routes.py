"""Router choices: the type they are kept in, and what stands for one that was not captured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnstream.batching.merge.storing import narrowed
from turnstream.errors import InvalidTurnError


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [
        (255, np.uint8),
        (256, np.int16),
        (300, np.int16),
        (32_767, np.int16),
        (32_768, np.int32),
        (2**31 - 1, np.int32),
    ],
)
def test_case_11_the_type_is_the_narrowest_that_holds_every_choice(
    largest: int, dtype: Any
) -> None:
    # As in the reference.
    choices = narrowed(np.array([[[3, largest]]], np.int64))

    assert (choices.tolist(), choices.dtype) == ([[[3, largest]]], dtype)


@pytest.mark.parametrize(
    ("expert", "message"), [(2**31, "expert 2147483648 is above 2147483647"), (-1, "expert -1 is")]
)
def test_case_11_an_expert_that_no_type_of_theirs_holds_is_refused(
    expert: int, message: str
) -> None:
    with pytest.raises(InvalidTurnError, match=f"^routes: {message}"):
        narrowed(np.array([[[0, expert]]], np.int64))
