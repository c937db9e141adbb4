"""The format number of a run stands in Python and in a script: both must be the same."""

from __future__ import annotations

import re

from testkit.scripts import script_files
from turnstream.records.configs import RUN_FORMAT


def test_script_admits_groups_of_the_format_that_python_writes() -> None:
    source = script_files()["open_group"].read_text()

    (number,) = re.findall(r"local RUN_FORMAT = (\d+)", source)

    assert int(number) == RUN_FORMAT
