"""Lives from seeds keep the promise; a guard that is broken is seen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.guards import first_seed, guard_of
from simulator.lives import lives

PER_TEST = 50
FIRST_SEEDS = range(0, 200, PER_TEST)

QUICKLY_SEEN = (
    "append: a turn that is stored already",
    "open_group: capacity",
    "post_sealed: a seal counts once",
    "post_reward: what awaits none",
)
"""Broken guards that few lives show."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_lives_from_seeds_keep_the_promise(first: int, request: pytest.FixtureRequest) -> None:
    asked = request.config.getoption("--seed", default=None)
    if asked is not None and first:
        pytest.skip("one seed was asked for")
    seeds = range(first, first + PER_TEST) if asked is None else range(asked, asked + 1)

    failed = [verdict for verdict in lives(seeds) if verdict.problems]

    # To live one of them again: pytest tests/simulation --seed N
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_same_seed_is_the_same_life_in_every_process() -> None:
    here = [verdict.digest for verdict in lives(range(3, 6))]

    folder = Path(__file__).parent
    script = "from simulator.lives import lives\nfor v in lives(range(3, 6)): print(v.digest)"
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONHASHSEED": "7"}
    there = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )

    assert [int(line) for line in there.stdout.split()] == here


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", QUICKLY_SEEN)
def test_a_guard_that_is_broken_is_seen_within_a_few_lives(name: str) -> None:
    assert first_seed(guard_of(name), range(60)) is not None
