"""The experts a mixture-of-experts router chose while sampling, laid out to be replayed.

A row has the choices of its first tokens: the last sampled token, and an end token that was put
behind it, never went through the model. Everywhere else stands the dummy choice 0, 1 .. topk-1,
whose experts are distinct, as kernels require; which slots those are is said by a mask of their
own. The loss mask would not do: prompt and observed tokens are not trained, but they are routed.

Shapes: N slots, B rows, T columns, L layers, K experts per token (`topk`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.layout import require_fits
from turnstream.errors import BatchingError, InvalidTurnError
from turnstream.types import Ragged

_DTYPES: tuple[tuple[int, type[np.integer]], ...] = (
    (1 << 8, np.uint8),
    (1 << 15, np.int16),
    (1 << 31, np.int32),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Router choices in slots, or in a rectangle of them.

    Attributes:
        choices: (..., L, K), uint8, int16 or int32: the narrowest that holds every choice.
        is_missing: bool (...,), no choice was captured there: the dummy stands for it.
    """

    choices: NDArray[Any]
    is_missing: NDArray[np.bool_]


def route_column(routes_B: Sequence[NDArray[np.integer]], lengths_B: Sequence[int]) -> Ragged[Any]:
    """The choices of all rows in one buffer (tokens, L, K), in the narrowest type.

    Args:
        routes_B: per row an integer array (captured tokens, L, K), L and K the same everywhere.
        lengths_B: tokens of every row; at least one and at most all of them are captured.

    Raises:
        BatchingError: names the row and what is wrong with it.
    """
    if len(routes_B) != len(lengths_B) or not len(routes_B):
        raise BatchingError(f"routes of {len(routes_B)} rows for {len(lengths_B)} rows")
    for row, (routes, length) in enumerate(zip(routes_B, lengths_B, strict=True)):
        wrong = _what_is_wrong(routes, length) or (
            f"shape {routes.shape[1:]} is not {routes_B[0].shape[1:]} of row 0"
            if routes.shape[1:] != routes_B[0].shape[1:]
            else ""
        )
        if wrong:
            raise BatchingError(f"routes of row {row}: {wrong}")
    offsets = np.cumsum([0, *map(len, routes_B)]).astype(np.int32)
    return Ragged(narrowed(np.concatenate(routes_B)), offsets)


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


def place_routes(routes: Ragged[Any], *, starts: NDArray[np.int64], num_slots: int) -> Routes:
    """The choices of every row from its first slot on, (N, L, K); the dummy everywhere else.

    Args:
        routes: one entry per captured token, from `route_column`.
        starts: first slot of every row, in any layout.
        num_slots: N.
    """
    num_layers, topk = shape = routes.values.shape[1:]
    dummy = dummy_choice(shape, routes.values.dtype)
    choices_NLK = np.broadcast_to(dummy, (num_slots, num_layers, topk)).copy()
    is_missing_N = np.ones(num_slots, np.bool_)
    for start, row in zip(starts.tolist(), routes, strict=True):
        choices_NLK[start : start + len(row)] = row
        is_missing_N[start : start + len(row)] = False
    return Routes(choices=choices_NLK, is_missing=is_missing_N)


def left_padded_routes(routes: Ragged[Any], *, lengths_B: NDArray[np.int32], width: int) -> Routes:
    """The choices beside left-padded rows, (B, T, L, K).

    Args:
        routes: one entry per captured token, from `route_column`.
        lengths_B: tokens of every row.
        width: T, in tokens.

    Raises:
        RowTooLongError: a row is longer than `width`.
    """
    require_fits(lengths_B, width)
    num_rows = len(lengths_B)
    ends: NDArray[np.int64] = np.arange(1, num_rows + 1, dtype=np.int64) * width
    placed = place_routes(routes, starts=ends - lengths_B, num_slots=num_rows * width)
    shape = num_rows, width
    return Routes(
        choices=placed.choices.reshape(*shape, *routes.values.shape[1:]),
        is_missing=placed.is_missing.reshape(shape),
    )


def _what_is_wrong(routes: object, length: int) -> str:
    if not isinstance(routes, np.ndarray):
        return f"a {type(routes).__name__}, not an integer array (tokens, layers, topk)"
    choices = cast("NDArray[Any]", routes)
    if choices.dtype.kind not in "iu" or choices.ndim != 3:
        return f"{choices.dtype}{list(choices.shape)}, not an integer array (tokens, layers, topk)"
    if not 1 <= len(choices) <= length:
        return f"{len(choices)} captured tokens of {length}"
    smallest = int(choices.min(initial=0))
    return f"expert {smallest}" if smallest < 0 else ""
