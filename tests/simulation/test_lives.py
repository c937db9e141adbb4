"""Simulated runs keep the promise, and fail where a guard is broken."""

from __future__ import annotations

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
from testkit.scripts import script, script_files

PER_TEST = 45
FIRST_SEEDS = range(0, 180, PER_TEST)

QUICKLY_SEEN = {
    "open_group: capacity": 120,
    "open_group: a trajectory that is open": 160,
    "open_group: groups that are open at a time": 160,
    "open_task: a prompt that waits is no new one": 400,
    "heartbeat: the lease is renewed": 240,
    "take_over: the next epoch": 160,
    "post_reward: what awaits none": 160,
    "acquire_leader: the lease of another": 80,
    "write_manifest: the next step": 600,
    "give_back: bytes of a batch": 160,
    "start_session: what was stepped comes back": 240,
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
    "observed: never falls": 400,
}
"""Guards that few simulated runs show, and the largest number of runs for each.

The numbers are several times those of today. `python -m simulator.guards` prints the whole table.
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_simulated_runs_keep_the_promise(first: int, request: pytest.FixtureRequest) -> None:
    asked = request.config.getoption("--seed", default=None)
    if asked is not None and first:
        pytest.skip("one seed was asked for")
    seeds = range(first, first + PER_TEST) if asked is None else range(asked, asked + 1)

    failed = [verdict for verdict in lives(seeds) if verdict.problems]

    # To repeat one of them: pytest tests/simulation --seed N
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_seed_gives_the_same_run_in_every_process() -> None:
    here = [verdict.digest for verdict in lives(range(3, 6))]
    again = [verdict.digest for verdict in lives(range(5, 2, -1))]

    folder = Path(__file__).parent
    script = """
from simulator.lives import lives_of
for verdict in lives_of(range(3, 6), num_processes=2, per_chunk=2): print(verdict.digest)
"""
    paths = os.pathsep.join([str(folder), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "7"}
    there = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )

    assert [int(line) for line in there.stdout.split()] == here == again[::-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", QUICKLY_SEEN)
def test_broken_guard_fails_one_of_the_first_runs(name: str) -> None:
    assert first_seed(guard_of(name), range(QUICKLY_SEEN[name])) is not None


@pytest.fixture(scope="module")
def sources() -> list[bytes]:
    """Return the source of every script."""
    return [script(name).source.encode() for name in script_files()]


@pytest.mark.parametrize("guard", GUARDS, ids=[each.name for each in GUARDS])
def test_guard_of_the_table_is_in_the_code(guard: Guard, sources: list[bytes]) -> None:
    with guard.broken():  # raises where no script has its text
        for source in sources:
            SCRIPTS.load(source)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_seed_of_a_failed_run_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    guard = "selector: what was chosen is planned"
    arguments = ["--first", "0", "--seeds", "40", "--failures", "1", "--processes", "1"]

    with guard_of(guard).broken():
        code = main(arguments)

    seed = capsys.readouterr().out.splitlines()[-1].removeprefix("FAILED: python -m simulator ")
    with guard_of(guard).broken():
        assert main(seed.split()) == code == 1
    assert main(seed.split()) == 0
