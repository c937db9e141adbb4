"""Extra columns of a run in addition to tokens, such as router choices, images, position ids.

A declaration has the type of a value, and its extent: the unit of a turn and of a row that has one
value. Everything else follows from the extent:

==============  ============================================  =====================================
extent          values of a turn                              values of a merged row
==============  ============================================  =====================================
token           one value per token of prompt + response      one per token
first_tokens    router choices of its first k tokens          those of its first tokens: the most
                                                              that any of its turns captured
response_token  one value per response token                  one per response token, the fill where
                                                              a token was observed
row             one value                                     that value, where its turns agree
items           every item of its prompt, such as the         every item of its last prompt, in
                patches of all images                         order
==============  ============================================  =====================================

The values of a turn cover its whole prompt. Values that an earlier turn of the trajectory has are
found and sent once. See `turnstream.batching.merge.merging`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import InvalidConfigError

Extent = Literal["token", "first_tokens", "response_token", "row", "items"]
"""Unit of a row that has one value of an extra column: each token, each captured first token, each
response token, the row itself, or each of its own items, such as patches of an image."""

EXTRA_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
"""Types of declared columns: those that numpy, Arrow and torch have in common."""

ROUTE_DTYPES = ("uint8", "int16", "int32")
"""Types of router choices; they are sent in the narrowest sufficient one."""

_Count = TypeVar("_Count", int, NDArray[np.int32])

_MAX_NAME_LENGTH = 64
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredColumn:
    """An extra column of a run, declared once in its configuration.

    >>> DeclaredColumn(name="routes", per="first_tokens", dtype="int16", shape=(2, 4)).shape
    (2, 4)

    Attributes:
        name: a Python identifier of ASCII letters.
        per: unit that has one value. "first_tokens" is for router choices.
        dtype: type of the numbers, one of EXTRA_DTYPES; for router choices the widest of
            ROUTE_DTYPES that may be needed.
        shape: shape of one value; () is a number. Router choices are (layers, topk).
        fill: value of tokens without a value: observed tokens of a "response_token" column, and
            the tokens or turns that an optional column omits.
        is_optional: a turn may omit the column. One without items always may.
        is_constant: for per="row": all turns of a trajectory have the same value; turns that omit
            an optional column have the value of the first turn. A run that merges turns refuses
            other such columns, because a merged row can have only one value.
    """

    name: str
    per: Extent
    dtype: str
    shape: tuple[int, ...] = ()
    fill: float = 0
    is_optional: bool = False
    is_constant: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidConfigError for a wrong field; it names the column and the value."""
        if not isinstance(self.name, str) or not _is_name(self.name):  # pyright: ignore[reportUnnecessaryIsInstance] -- JSON gives anything
            raise InvalidConfigError(
                "extra_columns",
                f"{self.name!r} is no name of at most {_MAX_NAME_LENGTH} letters, digits and "
                "underscores",
            )
        if self.per not in get_args(Extent):
            self._refuse("per", f"is not one of {', '.join(get_args(Extent))}")
        if self.dtype not in EXTRA_DTYPES:
            self._refuse("dtype", f"is not one of {', '.join(EXTRA_DTYPES)}")
        object.__setattr__(self, "shape", self._checked_shape())
        object.__setattr__(self, "fill", self._checked_fill())
        for field in ("is_optional", "is_constant"):
            if not isinstance(getattr(self, field), bool):
                self._refuse(field, "is neither true nor false")
        self._check_combinations()

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Type of the numbers."""
        return np.dtype(self.dtype)

    def _check_combinations(self) -> None:
        if self.per == "first_tokens":
            if len(self.shape) != 2:
                self._refuse("shape", "is not the (layers, topk) of router choices")
            if self.dtype not in ROUTE_DTYPES:
                self._refuse("dtype", f"is not one of {', '.join(ROUTE_DTYPES)}: router choices")
            if self.shape[1] - 1 > np.iinfo(self.dtype).max:
                self._refuse("dtype", f"cannot count the {self.shape[1]} experts of a token")
            if self.fill:
                self._refuse("fill", "is never written: uncaptured tokens have the choice 0, 1 ..")
        if self.is_constant and self.per != "row":
            self._refuse("is_constant", f"is for per='row', not for per={self.per!r}")

    def _checked_shape(self) -> tuple[int, ...]:
        try:
            shape = tuple(self.shape)
        except TypeError:
            shape = (0,)
        is_whole = all(type(size) is int and 1 <= size < 2**31 for size in shape)
        if not is_whole or len(shape) > _MAX_DIMENSIONS:
            self._refuse(
                "shape", f"is no list of at most {_MAX_DIMENSIONS} whole numbers of at least 1"
            )
        return shape

    def _checked_fill(self) -> float:
        """Return a whole number for an integer column, otherwise a finite float."""
        fill: Any = self.fill
        if isinstance(fill, bool) or not isinstance(fill, int | float) or fill != fill:
            self._refuse("fill", "is no number")
        if self.numpy_dtype.kind == "f":
            if abs(fill) > float(np.finfo(self.dtype).max):
                self._refuse("fill", f"is no finite {self.dtype}")
            return float(fill)
        limits = np.iinfo(self.dtype)
        if not limits.min <= fill <= limits.max or fill != int(fill):
            self._refuse("fill", f"is no {self.dtype}")
        return int(fill)

    def _refuse(self, field: str, message: str) -> None:
        raise InvalidConfigError(
            f"extra_columns[{self.name!r}].{field}", f"{getattr(self, field)!r} {message}"
        )


def num_values(per: Extent, *, num_tokens: _Count, num_response: _Count) -> _Count | int | None:
    """Return the number of values of a row or a turn; None where its lengths do not say it."""
    counts: dict[Extent, _Count | int] = {
        "token": num_tokens,
        "response_token": num_response,
        "row": 1,
    }
    return counts.get(per)


class ExtraPiece(NamedTuple):
    """The values of an extra column in a stored turn.

    The values of the whole turn are the first `num_shared` of its parent's, then `values`.
    """

    num_shared: int
    values: NDArray[Any]


def _is_name(name: str) -> bool:
    return name.isascii() and name.isidentifier() and len(name) <= _MAX_NAME_LENGTH
