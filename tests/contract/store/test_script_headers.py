"""The header of a script is its contract: it names every key and argument that the code uses."""

from __future__ import annotations

import re

import pytest

from testkit.runs.scripts import script_files
from turnstream.store.client import keys

FILES = [*script_files().values()]
OF_GENERATORS = {path.name: path for path in FILES if "turnstream_server" not in path.parts}
PARTS = (
    *("lease_end.lua", "run_clock.lua", "slices.lua", "finished_names.lua", "whole_numbers.lua"),
    *("group_admission.lua", "group_members.lua"),
)
"""Parts that several scripts include; no script by itself."""
NAMES = sorted({*OF_GENERATORS} - {*PARTS, "server_time.lua"})


def split(name: str) -> tuple[str, str]:
    """Header and code."""
    text = OF_GENERATORS[name].read_text()
    header = re.match(r"#!lua[^\n]*\n(?:--[^\n]*\n)+", text)
    assert header is not None, f"{name} has no header"
    return header[0], text[header.end() :]


def test_a_script_names_each_key_as_its_description_does() -> None:
    """The keys are described in `store/client/keys.py`, or in the header of the script."""
    stored = [*keys.run_keys("maze"), *keys.trajectory_keys("maze", "g/0/0")]
    known = {*(key.rpartition(":")[2] for key in stored), "incarnation", "batchers"}
    unpacked = re.compile(r"^local ([\w,\s]+?) = (?:unpack\(KEYS\)|KEYS\[1\])$", re.MULTILINE)

    for name in NAMES:
        header, code = split(name)
        if lines := unpacked.findall(code):
            (line,) = lines
            used = [each.strip().lower() for each in line.split(",")]
            assert {*used} <= known, name
            assert len({*used}) == len(used), name
            assert code.count("KEYS") == 1, name
        else:
            described = re.findall(r"(KEYS\[\d+\]) \w+ +(hash|stream|set|string|zset)\b", header)
            assert {key for key, _ in described} == {*re.findall(r"KEYS\[\d+\]", code)}, name


@pytest.mark.parametrize("name", NAMES)
def test_the_header_describes_arguments_and_reply(name: str) -> None:
    header, code = split(name)

    arguments = set(re.findall(r"ARGV\[(\d+)\]", code))

    assert "-- Reply:" in header or code.endswith("return 1\n")
    assert {number for number in arguments if f"ARGV[{number}" not in header} == set()


def test_scripts_unpack_only_bounded_lists() -> None:
    # `unpack` fails above some 8,000 values, and a script that fails after a write leaves half of
    # its work: open_group left groups open without a writer.
    bounded = re.compile(
        r"unpack\((?:\s*redis\.call\('HMGET',\s+\w+(?:\[\d+\])?,\s+'"  # fields named one by one
        r"|KEYS(?:, \d)?\)|counter\)|entry\[2\]\)"  # keys; one counter; fields of one stream entry
        r"|(?:words|ids|ARGV), (?:start|i), |(?:changes|some)\)"  # slices
        r"|names\)|open\["  # a list in the script
        r"|ARGV, [23]\))"  # the fields of one record
    )

    texts = {file.name: file.read_text() for file in FILES}

    assert [
        (name, line)
        for name, text in texts.items()
        for line in re.findall(r"(?<!`)unpack\(.*\n?.*", text)
        if not bounded.match(line)
    ] == []
