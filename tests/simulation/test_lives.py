"""Lives from seeds keep the promise; a guard that is broken is seen."""

from __future__ import annotations

import importlib.resources
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.__main__ import main
from simulator.breaks import Guard
from simulator.guards import GUARDS, first_seed, guard_of
from simulator.lives import lives
from simulator.store import SCRIPTS
from simulator.unseen import UNSEEN
from turnstream.store.scripts import Script

PER_TEST = 45
FIRST_SEEDS = range(0, 180, PER_TEST)

QUICKLY_SEEN = {
    "open_group: capacity": 120,
    "open_group: a trajectory that is open": 160,
    "open_group: a group that is decided": 240,
    "open_group: groups that are open at a time": 160,
    "next_task: a prompt that waits is no new one": 400,
    "heartbeat: the lease is renewed": 240,
    "take_over: the next epoch": 160,
    "post_reward: what awaits none": 160,
    "acquire_leader: the lease of another": 80,
    "write_manifest: the next step": 600,
    "withdraw_plans: bytes of a batch": 200,
    "settle_group: bytes of what was never begun": 200,
    "give_back: bytes of a batch": 160,
    "start_session: what was stepped comes back": 240,
    "committed: the epoch and the name of the session": 600,
    "fold: one member per sample": 160,
    "selector: what was chosen is planned": 40,
    "leader: plans take their groups in the replay": 160,
    "releaser: a group that may get members": 160,
    "planner: what belongs to one start of the store": 500,
    "window: what may be lost is kept": 160,
    "outbox: what was lost is sent again": 200,
    "every script: the epoch of the leader": 160,
    "reopen_run: what was finished": 240,
    "announce_revision: groups of the steps before": 600,
    "revise_config: the order of steps": 600,
    "write_manifest: a short step": 40,
    "observe: what is not retained": 400,
    "observed: never falls": 400,
}
"""Guards that few lives show where they are broken, and how many at most: several times what it
takes today, so that another order of things does not change it. `python -m simulator.guards` is
the whole table."""


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
    again = [verdict.digest for verdict in lives(range(5, 2, -1))]

    folder = Path(__file__).parent
    script = """
from simulator.parallel import lives_of
for verdict in lives_of(range(3, 6), num_processes=2, per_chunk=2): print(verdict.digest)
"""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONHASHSEED": "7"}
    there = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )

    assert [int(line) for line in there.stdout.split()] == here == again[::-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", QUICKLY_SEEN)
def test_a_guard_that_is_broken_is_seen_within_a_few_lives(name: str) -> None:
    assert first_seed(guard_of(name), range(QUICKLY_SEEN[name])) is not None


@pytest.fixture(scope="module")
def sources() -> list[bytes]:
    """Every script as a store is given it."""
    return [
        Script(file.name.removesuffix(".lua"), package).source.encode()
        for package in ("turnstream.store", "turnstream_server.bus")
        for file in (importlib.resources.files(package) / "lua").iterdir()
    ]


@pytest.mark.parametrize("guard", GUARDS, ids=[each.name for each in GUARDS])
def test_a_guard_of_the_table_is_in_the_code(guard: Guard, sources: list[bytes]) -> None:
    with guard.broken():  # which refuses to end where no script has its text
        for source in sources:
            SCRIPTS.load(source)


@pytest.mark.parametrize("name", UNSEEN)
def test_a_guard_that_no_life_shows_has_a_test_of_its_own(name: str) -> None:
    file, _, test = UNSEEN[name][1].partition("::")

    source = (Path(__file__).parents[1] / "integration/bus" / file).read_text()

    assert guard_of(name).name == name
    assert f"def {test}(" in source


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_seed_of_a_life_that_went_wrong_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    guard = "selector: what was chosen is planned"
    arguments = ["--first", "0", "--seeds", "40", "--failures", "1", "--processes", "1"]

    with guard_of(guard).broken():
        code = main(arguments)

    seed = capsys.readouterr().out.splitlines()[-1].removeprefix("FAILED: python -m simulator ")
    with guard_of(guard).broken():
        assert main(seed.split()) == code == 1
    assert main(seed.split()) == 0
