"""The call of a hosted model on a run."""

from __future__ import annotations

import sys

import pytest

import turnstream
from turnstream.errors import MissingExtraError


def test_call_on_a_run_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)

    with pytest.raises(MissingExtraError, match=r"turnstream\[tinker\]"):
        turnstream.forward_backward_run(object(), run="demo")
