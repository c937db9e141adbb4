"""The command of CI, with programs of the machine replaced by small scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
USED = ("bash", "env", "dirname", "mktemp", "rm", "touch", "chmod", "timeout")
MISSING = [
    f"no {program}, and apt-get cannot install it here: its tests are skipped"
    for program in ("redis-server", "promtool")
]
TESTS = """
import pytest

def test_that_passes(): pass
def test_that_fails(): assert False

@pytest.mark.parametrize("number", range(1200))
def test_on_redis(number): pytest.skip("no redis-server is installed")

@pytest.mark.skipif(True, reason="no CUDA device")
def test_on_a_device(): pass
"""


class Machine:
    """A machine whose programs are those of `USED`, Python, and what a test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in USED:
            found = shutil.which(name)
            assert found is not None
            (folder / name).symlink_to(found)
        self.write("python3", f'exec {sys.executable} "$@"')
        self.write("make", 'echo "make $* with CI=$CI in $PWD"')

    def write(self, name: str, script: str) -> None:
        """Add a program that is this shell script."""
        path = self.folder / name
        path.write_text(f"#!{shutil.which('sh')}\n{script}\n")
        path.chmod(0o755)

    def write_servers(self) -> None:
        """Add the programs that CI would install."""
        for name in ("redis-server", "promtool"):
            self.write(name, "")

    def lend_apt(self, *, user_id: int, apt_get: str) -> None:
        """Add `id`, `service`, and an `apt-get` that logs its arguments and then does this."""
        log = self.folder / "log"
        self.write("id", f"echo {user_id}")
        self.write("service", f'echo "service $*" >> {log}')
        self.write("apt-get", f'echo "apt-get $*" >> {log}; {apt_get}')

    def run_ci(self, *target: str) -> subprocess.CompletedProcess[str]:
        """Run the command of CI."""
        environment = {"PATH": str(self.folder)}
        return subprocess.run(
            [REPOSITORY / ".ci/run", *target],
            env=environment,
            capture_output=True,
            check=False,
            text=True,
        )

    def log(self) -> list[str]:
        """Return the calls of `apt-get` and `service`, in order."""
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without redis-server and promtool."""
    return Machine(tmp_path)


def test_ci_runs_make_test_with_ci_set(machine: Machine) -> None:
    machine.write_servers()
    machine.lend_apt(user_id=0, apt_get="true")

    done = machine.run_ci()

    assert done.stdout.splitlines()[0] == f"make test with CI=true in {REPOSITORY}"
    assert machine.log() == []
    assert done.returncode == 0
    assert machine.run_ci("newest").stdout.startswith("make newest with CI=true")


def test_ci_installs_servers_and_stops_their_daemons(machine: Machine) -> None:
    # CI skipped 969 of 6,632 tests, because no machine had a redis-server.
    folder = machine.folder
    install = f"touch {folder}/$program; chmod +x {folder}/$program"
    names = "*redis-server) program=redis-server;; *prometheus) program=promtool;; *) exit 0;;"
    machine.lend_apt(user_id=0, apt_get=f'case "$*" in {names} esac; {install}')

    done = machine.run_ci()

    command = "apt-get install -q -y --no-install-recommends"
    assert machine.log() == [
        "apt-get update -q",
        f"{command} redis-server",
        "service redis-server stop",
        "apt-get update -q",
        f"{command} prometheus",
        "service prometheus stop",
    ]
    assert done.stdout.startswith("make test")


@pytest.mark.parametrize(
    ("user_id", "apt_get"),
    [(0, "exit 100"), (1000, "true"), (0, None)],
    ids=["no network", "no root", "no apt-get"],
)
def test_ci_tests_without_servers(machine: Machine, user_id: int, apt_get: str | None) -> None:
    if apt_get is None:
        machine.write("id", f"echo {user_id}")
    else:
        machine.lend_apt(user_id=user_id, apt_get=apt_get)

    done = machine.run_ci()

    assert done.stdout.splitlines()[:3] == [*MISSING, f"make test with CI=true in {REPOSITORY}"]
    assert done.returncode == 0
    assert done.stderr == ""


def test_ci_counts_skips_by_reason_in_its_last_line(machine: Machine) -> None:
    # The number of skipped tests was one word in a long output, and no reason was shown.
    (machine.folder / "test_few.py").write_text(TESTS)
    (machine.folder / "pytest.ini").write_text("[pytest]\n")
    tests = f"-q -p no:cacheprovider -c {machine.folder}/pytest.ini {machine.folder}/test_few.py"
    machine.write("make", f"{sys.executable} -m pytest {tests}; exit 2")
    machine.write_servers()

    done = machine.run_ci()

    assert done.stdout.splitlines()[-1] == (
        "1 failed, 1 passed, 1,201 skipped (1,200: no redis-server is installed, 1: no CUDA device)"
    )
    assert done.returncode == 2


def test_ci_says_that_no_test_ran(machine: Machine) -> None:
    machine.write("make", "exit 3")
    machine.write_servers()

    done = machine.run_ci()

    assert done.stdout.splitlines() == ["no test ran: pytest wrote no report"]
    assert done.returncode == 3
