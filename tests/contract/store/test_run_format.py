"""Numbers that stand in Python and in a script: both must be the same."""

from __future__ import annotations

import re

from testkit.runs.scripts import script_files
from turnstream.records.configs import RUN_FORMAT
from turnstream.store.run import groups


def test_script_admits_groups_of_the_format_that_python_writes() -> None:
    source = script_files()["open_group"].read_text()

    (number,) = re.findall(r"local RUN_FORMAT = (\d+)", source)

    assert int(number) == RUN_FORMAT


def test_script_limits_attempts_as_python_does() -> None:
    source = script_files()["group_members"].read_text()

    found = {name: int(number) for name, number in re.findall(r"local ([A-Z_]+) = (\d+)", source)}

    assert found
    assert found == {name: getattr(groups, name) for name in found}
