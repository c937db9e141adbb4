"""Simulated runs keep the promise, and fail where a guard is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.__main__ import main
from simulator.guards import GUARDS, LATE_SEEDS, MOST_SEEDS, first_failed_seed
from simulator.runs import simulate_all
from turnstream_server.ledger.planning import plan_writes

PER_TEST = 45
FIRST_SEEDS = [
    *range(0, 90, PER_TEST),
    *(pytest.param(first, marks=pytest.mark.campaign) for first in range(90, 720, PER_TEST)),
]
FOUND_LATE = {
    "every script: the epoch of the leader",
    "heartbeat: the lease is renewed",
    "observed: never falls",
    "open_group: a prompt that waits is no new one",
    "outbox: lost writes are sent again",
    "planner: one start of the store",
    "revise_config: the order of steps",
    "write_manifest: the next step",
}
"""Guards whose break fails none of the first few runs."""


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_simulated_runs_keep_the_promise(first: int, request: pytest.FixtureRequest) -> None:
    asked = request.config.getoption("--seed", default=None)
    if asked is not None and first:
        pytest.skip("one seed was asked for")
    seeds = range(first, first + PER_TEST) if asked is None else range(asked, asked + 1)

    failed = [verdict for verdict in simulate_all(seeds) if verdict.problems]

    # To repeat one of them: pytest tests/simulation --seed N
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.slow
def test_plans_in_many_slices_keep_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_writes, "SLICE", 1)  # each group is a slice of its own

    failed = [verdict for verdict in simulate_all(range(PER_TEST)) if verdict.problems]

    assert not failed, "\n".join(map(str, failed))


@pytest.mark.slow
def test_seed_gives_the_same_run_in_every_process() -> None:
    here = [verdict.digest for verdict in simulate_all(range(3, 6))]
    again = [verdict.digest for verdict in simulate_all(range(5, 2, -1))]

    folder = Path(__file__).parent
    script = """
from simulator.runs import simulate_parallel
for verdict in simulate_parallel(range(3, 6), num_processes=2, per_chunk=2): print(verdict.digest)
"""
    paths = os.pathsep.join([str(folder), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "7"}
    there = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )

    assert [int(line) for line in there.stdout.split()] == here == again[::-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "guard",
    [
        pytest.param(each, marks=[pytest.mark.campaign] if each in FOUND_LATE else [])
        for each in GUARDS
    ],
)
def test_broken_guard_fails_one_of_the_first_runs(guard: str) -> None:
    most = LATE_SEEDS if guard in FOUND_LATE else MOST_SEEDS

    assert first_failed_seed(GUARDS[guard], most=most) is not None


@pytest.mark.slow
def test_seed_of_a_failed_run_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    broken = GUARDS["selector: chosen groups are planned"]
    arguments = ["--first", "0", "--seeds", "40", "--failures", "1", "--processes", "1"]

    with broken():
        code = main(arguments)

    seed = capsys.readouterr().out.splitlines()[-1].removeprefix("FAILED: python -m simulator ")
    with broken():
        assert main(seed.split()) == code == 1
    assert main(seed.split()) == 0
