"""Somebody asks why the turns of a batch did not become one row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from testkit import group, trajectory, turn
from turnstream.errors import NotReadyError

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

RUN = "agents"
MEMBERS = (
    [turn("ab", "CD"), turn("abcde", "F")],
    [turn("abcdef", "GH"), turn("abcdefgxij", "K")],
    [turn("ab", "CD"), turn("abcde", "F"), turn("abcdx", "Y")],
    [turn("ab", "CD"), turn("abc", "E")],
)


@pytest.fixture(scope="module")
def typed(place: Any) -> Iterator[Any]:
    """Types commands about a run of one step: a whole trajectory, an edit, a branch, a cut."""
    place.create_run(RUN)
    members = [trajectory(*turns, sample=n, reward=float(n)) for n, turns in enumerate(MEMBERS)]
    place.publish(RUN, group("g1", *members))
    place.train(RUN)
    return place.type


def letters(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def test_the_merge_of_a_batch_shows_its_ratio_and_where_trajectories_break(typed: Any) -> None:
    shown = typed("batch", RUN, "1", "--merge")
    found = json.loads(typed("batch", RUN, "1", "--merge", "--json"))

    assert "9 turns of 4 trajectories merge into 7 rows, 53 tokens into 45: 1.18 to 1" in shown
    rows = [re.split(r" *│ *", line)[1:-1] for line in shown.splitlines() if line[0] == "│"]
    assert rows == [
        ["g1/1/0", "1", "turn 0", "7", "100 101 102 103 [104]", "100 101 102 103 [120] 105 106"],
        ["g1/2/0", "2", "turn 0", "4", "97 98 99 100 [its end]", "97 98 99 100 [120]"],
        ["g1/3/0", "1", "turn 0", "3", "97 98 99 [100]", "97 98 99 [the end of the prompt]"],
    ]
    edited = found["breaks"][0]
    assert (found["merge"], found["num_rows"], found["num_turns"]) == (True, 7, 9)
    assert (edited["trajectory"], edited["turn"], edited["position"]) == ("g1/1/0", 1, 7)
    assert (edited["expected"], edited["found"]) == (ord("h"), ord("x"))
    assert edited["around_from"] == 3
    assert letters(edited["expected_around"]) == "defgh"
    assert letters(edited["found_around"]) == "defgxij"
    with pytest.raises(NotReadyError, match="step 9 is not planned; 1 are"):
        typed("batch", RUN, "9", "--merge")


def test_a_run_that_does_not_merge_says_what_merging_would_do(place: Any) -> None:
    place.create_run("plain", merge=False)
    whole = [trajectory(*MEMBERS[0], sample=n, reward=float(n)) for n in range(2)]
    place.publish("plain", group("g1", *whole))
    place.train("plain")

    shown = place.type("batch", "plain", "1", "--merge")

    assert "would merge, but for merge=False, into 2 rows" in shown
    assert "no trajectory breaks" in shown
