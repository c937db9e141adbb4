from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import turnstream_server
from turnstream.errors import InvalidConfigError
from turnstream_server import failpoints

PROGRAM = """
import sys
from turnstream_server.failpoints import arm, failpoint
arm(sys.argv[1])
for number in range(4):
    failpoint("plan.before_write")
    print("passed", number, flush=True)
"""


def run(text: str) -> tuple[int, int]:
    """Exit status, and how often the place was passed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, text], capture_output=True, check=False, text=True
    )
    return done.returncode, done.stdout.count("passed")


@pytest.mark.parametrize(
    ("text", "status", "num_passed"),
    [
        ("", 0, 4),
        ("plan.after_write", 0, 4),
        ("plan.before_write", -signal.SIGKILL, 0),
        ("plan.before_write@3", -signal.SIGKILL, 2),
    ],
)
def test_process_dies_at_the_named_pass_of_the_named_place(
    text: str, status: int, num_passed: int
) -> None:
    assert run(text) == (status, num_passed)


def test_a_process_sleeps_where_it_was_told_to() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "plan.before_write@2=stop"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stat = Path(f"/proc/{process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            pass
        process.send_signal(signal.SIGCONT)

        assert process.stdout.read().count(b"passed") == 3
        assert process.wait(60) == 0


@pytest.mark.parametrize("text", ["plan.nowhere", "plan.after_write@0", "plan.after_write=sing"])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="TURNSTREAM_FAILPOINT"):
        failpoints.arm(text)


def test_every_declared_place_is_in_the_code_once() -> None:
    folder = Path(turnstream_server.__file__).parent
    texts = [path.read_text() for path in folder.rglob("*.py") if path.name != "failpoints.py"]

    found = Counter(
        name for text in texts for name in re.findall(r'\bfailpoint\("([^"]*)"\)', text)
    )

    assert found == Counter(failpoints.NAMES)
