"""CPU seconds of cold starts: imports, commands, and `turnstream up` until it is ready.

    make bench                         # with the others
    python benchmarks/cold.py --tiny   # checks that it works

Every start is a process of its own; its CPU seconds are those of the kernel, the least of several
alternating rounds. The floor is the import of redis and numpy, which every part needs. Bytecode
is compiled before, into a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from processes import cpu_seconds

FLOOR = "import redis, numpy"
UP = "turnstream up, until ready"
GOALS_S = {"import turnstream": 0.15, "turnstream status": 0.5}
UP_GOAL_S = 3.0
PROGRAM = ("-m", "turnstream_server")


def starts(url: str) -> dict[str, list[str]]:
    """Return the arguments of `python` by the name of the start; the store at `url` has a run."""
    code = (
        *(FLOOR, "import turnstream", "from turnstream import connect"),
        "from turnstream.generator import Publisher",
        "from turnstream.worker import BatchStream",
    )
    return {
        **{each: ["-c", each] for each in code},
        "turnstream --help": [*PROGRAM, "--help"],
        "turnstream status": [*PROGRAM, "status", "--redis", url],
    }


def cpu_of(words: Sequence[str], environment: Mapping[str, str]) -> float:
    """Return the CPU seconds of a Python process from its start to its end."""
    child = subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{words} ended with status {child.returncode}")
    return used.ru_utime + used.ru_stime


def start_up(environment: Mapping[str, str]) -> dict[str, float]:
    """Return the wall seconds and the CPU seconds of `turnstream up` until it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        ports = [word for name in ("", "store-", "http-") for word in (f"--{name}port", "0")]
        command = [sys.executable, *PROGRAM, "up", "--data-dir", folder, *ports]
        began_s = time.monotonic()
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            if not any("Ctrl-C" in line for line in process.stdout):
                raise RuntimeError("`turnstream up` ended early")
            wall_s = time.monotonic() - began_s
            used_s = sum(map(cpu_seconds, family(process.pid)))
            process.terminate()  # a process in the background may ignore SIGINT
    return {"wall_s": wall_s, "cpu_s": used_s}


def family(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from family(int(child))


@contextlib.contextmanager
def store_with_a_run() -> Iterator[str]:
    """Return the URL of an embedded store."""
    from turnstream import connect
    from turnstream_server.embedded import EmbeddedServer

    with EmbeddedServer() as server:
        with connect(server.url) as service:
            service.create_run("demo", batch_groups=8)
        yield server.url


def measure(*, num_rounds: int) -> dict[str, Any]:
    """Return the CPU seconds of each start, the least of its rounds; a first round compiles."""
    with tempfile.TemporaryDirectory() as bytecode, store_with_a_run() as url:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        commands = starts(url)
        least_s = dict.fromkeys(commands, float("inf"))
        ups: list[dict[str, float]] = []
        for number in range(num_rounds + 1):
            found_s = {name: cpu_of(words, environment) for name, words in commands.items()}
            ups.append(start_up(environment))
            if number:
                least_s = {name: min(least_s[name], found_s[name]) for name in commands}
    least_s[UP] = min(each["cpu_s"] for each in ups[1:])
    return {
        "floor_s": least_s.pop(FLOOR),
        "cpu_s": least_s,
        "goals_s": GOALS_S,
        "up_wall_s": min(each["wall_s"] for each in ups[1:]),
        "up_goal_s": UP_GOAL_S,
    }


def main() -> None:
    """Measure, print one line for each start, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="one round, to check that it works")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(num_rounds=1 if arguments.tiny else arguments.rounds)
    for name, seconds in {FLOOR: found["floor_s"], **found["cpu_s"]}.items():
        goal = f"   at most {GOALS_S[name]}" if name in GOALS_S else ""
        print(f"{name:45} {seconds:6.3f} CPU s {seconds / found['floor_s']:6.2f} x floor{goal}")
    print(f"{UP}: {found['up_wall_s']:.2f} s, at most {UP_GOAL_S:.0f}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
