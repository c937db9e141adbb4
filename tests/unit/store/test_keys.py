from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.runs.stored_keys import declared_type
from turnstream.store.client import keys
from turnstream.types import TrajectoryKey
from turnstream.types.names import file_name

# A name that is no valid Unicode has no bytes, and so no key.
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@given(names, st.integers(0, 10**6), st.integers(0, 99))
def test_any_name_and_trajectory_id_survives_its_encoding(
    name: str, sample: int, attempt: int
) -> None:
    encoded, key = keys.encode_name(name), TrajectoryKey(name, sample, attempt)

    assert keys.decode_name(encoded) == name
    assert keys.parse_trajectory_id(keys.trajectory_id(key)) == key
    assert not set(encoded) & set("{}/:~ \n")  # which mean something in a key


@pytest.mark.parametrize("name", ["", "x" * 513, "ä" * 100])
def test_a_name_that_is_empty_or_too_long_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 512 are allowed"):
        keys.encode_name(name)


def test_names_of_every_length_have_files_of_their_own(tmp_path: Path) -> None:
    long = ["a" * 255, "a" * 256, "a" * 511 + "b", "a" * 512, "ä" * 85]

    for name in long:
        (tmp_path / file_name(name)).mkdir()

    assert file_name(long[0]) == long[0]


def test_all_keys_of_a_run_share_a_slot() -> None:
    tags = {key[key.index("{") : key.index("}")] for key in keys.run_keys("a/b")}

    assert tags == {"{a%2Fb"}


@given(names, names)
def test_every_key_is_declared(run: str, group_id: str) -> None:
    payload = keys.trajectory_keys(run, keys.trajectory_id(TrajectoryKey(group_id, 1)))

    everything = (*keys.run_keys(run), *payload, keys.RUNS, keys.NEWS)
    declared = [declared_type(key) for key in everything]

    assert None not in declared


def test_every_key_of_a_run_has_one_row_in_architecture() -> None:
    text = (Path(__file__).parents[3] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.split("## The keys of a run\n")[1].split("\n## ")[0]

    rows = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)

    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(key.rpartition(":")[2] for key in keys.run_keys("maze"))
