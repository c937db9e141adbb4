"""The programs of the README run as printed, against `turnstream up` on its default ports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import turnstream
from testkit import wait_until
from testkit.services.stores import client_of
from turnstream.types import TrajectoryState
from turnstream_server.ledger.core.frontier import Frontier, read_frontier
from turnstream_server.ledger.queries.ledger import read_ledger

pytestmark = [pytest.mark.grpc, pytest.mark.redis]

CLI = [sys.executable, "-P", "-m", "turnstream_server.cli"]
README = Path(__file__).parents[3] / "README.md"
SDK_ALONE = (
    "import runpy, sys; sys.modules['turnstream_server'] = None; runpy.run_path(sys.argv[1])"
)
NUM_GROUPS, NUM_SAMPLES, NUM_STEPS = 20, 4, 10


def programs() -> dict[str, str]:
    """Return the Python blocks of the README by the name in their first line."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return {block.partition("\n")[0].removeprefix("# "): block for block in blocks}


@pytest.fixture
def folder(stack: None, tmp_path: Path) -> Path:
    """A folder with the programs, while `turnstream up` runs."""
    for name, text in programs().items():
        (tmp_path / name).write_text(text)
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a program of the folder, without the server's package."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *words], cwd=folder, env=environment)


def frontier(service: turnstream.Service) -> Frontier:
    return read_frontier(client_of(service), "demo")


def test_readme_has_two_short_programs() -> None:
    counts = {
        name: sum(bool(line) and not line.startswith(("#", "import")) for line in text.split("\n"))
        for name, text in programs().items()
    }

    assert counts.keys() == {"generator.py", "trainer.py"}
    assert max(counts.values()) <= 13


def test_programs_of_the_readme_survive_kills_with_the_sdk_alone(folder: Path) -> None:
    """Takes more than 5 s: `turnstream up` starts, and programs are killed and restarted."""
    survive_kills(
        folder,
        generator=("-c", SDK_ALONE, "generator.py"),
        trainer=("-c", SDK_ALONE, "trainer.py"),
    )


@pytest.mark.campaign
def test_trainer_of_the_readme_survives_a_kill_under_torchrun(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

    frontier = survive_kills(folder, generator=("generator.py",), trainer=(*torchrun, "trainer.py"))

    assert frontier.dp_world_size == 2
    assert {path.name for path in folder.glob("*.pt")} == {"checkpoint-0.pt", "checkpoint-1.pt"}


@pytest.mark.campaign
def test_complete_trainer_survives_a_kill_with_two_ranks(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    example = str(README.parent / "examples/complete_trainer.py")

    frontier = survive_kills(
        folder, generator=("generator.py",), trainer=(*torchrun, example, "--folder", "out")
    )

    assert frontier.dp_world_size == 2
    checkpoints = sorted(path.name for path in (folder / "out").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-00000008", "checkpoint-00000010"]
    board = EventAccumulator(str(folder / "out")).Reload()
    assert [scalar.step for scalar in board.Scalars("train/loss")] == [*range(1, NUM_STEPS + 1)]


def survive_kills(
    folder: Path, *, generator: tuple[str, ...], trainer: tuple[str, ...]
) -> Frontier:
    """Kill both programs after two steps, start them again, and return the end of the run.

    Without a trainer a generator may open the groups of two steps; then it waits.
    """
    writer = start(folder, *generator)
    with turnstream.connect() as service:
        wait_until(lambda: "demo" in service.runs(), describe="the run", timeout_s=60)
        wait_until(lambda: num_sealed(service) == 16, describe="four groups", timeout_s=60)
        writer.kill()
        writer.wait()
        worker = start(folder, *trainer)
        wait_until(lambda: frontier(service).committed == 2, describe="step 2", timeout_s=90)
        kill_with_children(worker)

        again = [start(folder, *words) for words in (generator, trainer)]
        statuses = [process.wait(150) for process in again]

        ledger, end = read_ledger(client_of(service), "demo"), frontier(service)
    ledger.check()
    assert statuses == [0, 0]
    assert ledger.accepted == NUM_GROUPS * NUM_SAMPLES
    assert ledger.by_state[TrajectoryState.COMMITTED] == NUM_GROUPS * NUM_SAMPLES
    assert (end.stepped, end.committed) == (NUM_STEPS, NUM_STEPS)
    return end


def num_sealed(service: turnstream.Service) -> int:
    """Return the trajectories that are sealed, planned ones included."""
    states = read_ledger(client_of(service), "demo").by_state
    return states[TrajectoryState.SEALED] + states[TrajectoryState.PLANNED]


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process and the processes that it started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    process.wait()
