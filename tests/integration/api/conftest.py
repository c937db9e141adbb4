"""Names that no other test uses."""

from __future__ import annotations

import itertools

import pytest

_numbers = itertools.count(1)


@pytest.fixture
def new_name() -> str:
    """The name of a run that does not exist."""
    return f"api {next(_numbers)}"
