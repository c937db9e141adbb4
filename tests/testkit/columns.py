"""One declared column of each extent, and turns that bring values of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstream.types import DeclaredColumn, Turn

ROUTES = DeclaredColumn(name="routes", per="first_tokens", dtype="int16", shape=(1, 2))
IMAGES = DeclaredColumn(name="images", per="items", dtype="float32", shape=(2,))
POSITIONS = DeclaredColumn(name="positions", per="token", dtype="int32", shape=(3,))
TEACHER = DeclaredColumn(name="teacher", per="response_token", dtype="float32", fill=-9)
STYLE = DeclaredColumn(name="style", per="row", dtype="int8", is_constant=True)


def routes(*experts: int) -> NDArray[np.int16]:
    choices = [[[expert, expert + 1]] for expert in experts]
    return np.array(choices, np.int16).reshape(-1, 1, 2)


def images(*numbers: int) -> NDArray[np.float32]:
    return np.array([[number, number] for number in numbers], np.float32).reshape(-1, 2)


def with_columns(one: Turn, **extras: NDArray[Any]) -> Turn:
    return replace(one, extras=extras)
