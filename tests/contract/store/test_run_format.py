"""The format number of a run stands in Python and in a script: both must be the same."""

from __future__ import annotations

import importlib.resources
import re

from turnstream.records.configs import RUN_FORMAT


def test_script_admits_groups_of_the_format_that_python_writes() -> None:
    folder = importlib.resources.files("turnstream.store") / "lua"

    (number,) = re.findall(r"local RUN_FORMAT = (\d+)", (folder / "open_group.lua").read_text())

    assert int(number) == RUN_FORMAT
