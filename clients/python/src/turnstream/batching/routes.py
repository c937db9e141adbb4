"""The experts a mixture-of-experts router chose while sampling: what they are kept in.

They are extra columns of extent "first_tokens". A row has the choices of its first tokens: the last
sampled token, and an end token that was put behind it, never went through the model. Everywhere
else layouts (`turnstream.batching.extra_layouts`) write the dummy choice 0, 1 .. topk-1, whose
experts are distinct, as kernels require; which slots those are is said by a mask of their own. The
loss mask would not do: prompt and observed tokens are not trained, but they are routed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import InvalidTurnError

_DTYPES: tuple[tuple[int, type[np.integer]], ...] = (
    (1 << 8, np.uint8),
    (1 << 15, np.int16),
    (1 << 31, np.int32),
)


def narrowed(choices: NDArray[Any], *, field: str = "routes") -> NDArray[Any]:
    """The same choices in the narrowest type that holds them all.

    Raises:
        InvalidTurnError: names the field: an expert is below 0, or above what int32 can count.
    """
    smallest = int(choices.min(initial=0))
    if smallest < 0:
        raise InvalidTurnError(field, f"expert {smallest} is below 0")
    largest = int(choices.max(initial=0))
    dtype = next((dtype for limit, dtype in _DTYPES if largest < limit), None)
    if dtype is None:
        raise InvalidTurnError(field, f"expert {largest} is above {_DTYPES[-1][0] - 1}")
    return choices.astype(dtype, copy=False)


def dummy_choice(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """What stands for a choice that was not captured: 0, 1 .. topk-1 in every layer.

    Args:
        shape: of one value, (layers, topk); zeros where it is no list of whole numbers.
        dtype: of the choices.
    """
    if not shape or dtype.kind not in "iu":
        return np.zeros(shape, dtype)
    return np.broadcast_to(np.arange(shape[-1], dtype=dtype), shape)
