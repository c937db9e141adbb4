"""A run of the real stack: profile demo trains while each service is killed once, by SIGKILL.

    python deploy/stack_run.py --json run.json
    python deploy/stack_run.py --engine podman --compose "bash ../shared/lab/containers.sh compose"

Needs the images, an engine on this machine and the rights to kill its processes (root). It prints
the tables of docs/operations.md: start-up, kills, the ledger at the end, and idle services. The
project `turnstream` must not run before. Its volumes are removed before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

REPOSITORY: Final = Path(__file__).parents[1]
VICTIMS: Final = ("batcher", "gateway", "trainer", "generator", "redis")
IDLE: Final = ("redis", "batcher", "gateway")
READY: Final = ("python3", "-IS", "/usr/local/lib/turnstream/ready.py")
PING: Final = (
    *("sh", "-c"),
    "REDISCLI_AUTH=$(cat /secrets/operator/password) redis-cli --user operator ping | grep -q PONG",
)
METRICS: Final = """
import os, urllib.request
port = os.environ["TURNSTREAM_METRICS_LISTEN"].rpartition(":")[2]
key = open(os.environ["TURNSTREAM_KEY_FILE"]).read().strip()
headers = {"Authorization": "Bearer " + key}
request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
print(urllib.request.urlopen(request, timeout=5).read().decode())
"""
IDLE_S: Final = 60.0
_ENDS: Final = ("open", "sealed", "awaiting_reward", "planned")
"""States that no trajectory of a finished run is in."""


class Kill(NamedTuple):
    """The result of one SIGKILL; times in seconds from the kill.

    Attributes:
        service: its name.
        restarted_s: until its container ran again.
        ready_s: until it was ready again.
        next_step_s: until the trainer had done two further steps.
        reward: mean reward of the newest step, at that time.
        restarted_by: "engine", or "script" where the engine did not restart it.
    """

    service: str
    restarted_s: float
    ready_s: float
    next_step_s: float
    reward: float
    restarted_by: str


class Engine:
    """The containers of one compose project.

    Args:
        engine: command of the container engine.
        compose: command of compose, in words.
    """

    def __init__(self, engine: str, compose: Sequence[str]) -> None:
        self._engine = engine
        self._compose = [*compose]

    def compose(self, *words: str) -> str:
        """Run a compose command and return its output."""
        return _output([*self._compose, "--profile", "demo", "--profile", "operator", *words])

    def containers(self, service: str = "") -> list[str]:
        """Return the names of the containers of a service, or of all."""
        labels = ["label=com.docker.compose.project=turnstream"]
        labels += [f"label=com.docker.compose.service={service}"] if service else []
        filters = [word for label in labels for word in ("--filter", label)]
        return _output([self._engine, "ps", "-a", *filters, "--format", "{{.Names}}"]).split()

    def remove(self) -> None:
        """Remove all containers of the project, and its volumes."""
        if found := self.containers():
            _output([self._engine, "rm", "-f", *found])
        self.compose("down", "-v")

    def pid(self, container: str) -> int:
        """Return the process id of a container on this machine; 0 if it does not run."""
        return int(_output([self._engine, "inspect", "-f", "{{.State.Pid}}", container]))

    def start(self, container: str) -> None:
        """Start a container that has ended."""
        _output([self._engine, "start", container])

    def run_inside(self, container: str, *words: str) -> str | None:
        """Return the output of a command in a container; None if it failed."""
        done = subprocess.run(
            [self._engine, "exec", container, *words], capture_output=True, text=True, check=False
        )
        return done.stdout if done.returncode == 0 else None

    def is_ready(self, service: str) -> bool:
        """Return whether every container of a service is ready, by its health command."""
        command = PING if service == "redis" else READY
        found = self.containers(service)
        return bool(found) and all(self.run_inside(each, *command) is not None for each in found)

    def status(self) -> dict[str, Any] | None:
        """Return the status of the run; None while it cannot be read."""
        for service in ("batcher", "gateway"):
            for container in self.containers(service):
                words = ("turnstream", "status", "demo", "--json")
                if (found := self.run_inside(container, *words)) is not None:
                    return json.loads(found)
        return None

    def steps(self) -> int:
        """Return the number of trained steps; 0 while it cannot be read."""
        return (self.status() or {}).get("stepped", 0)

    def metric(self, service: str, name: str) -> float | None:
        """Return a metric of the first container of a service; None if it has none yet."""
        for container in self.containers(service)[:1]:
            page = self.run_inside(container, "python3", "-c", METRICS) or ""
            if found := re.search(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE):
                return float(found[1])
        return None


def main() -> None:
    """Run the stack and print the tables."""
    arguments = _arguments()
    engine = Engine(arguments.engine, shlex.split(arguments.compose))
    engine.remove()
    with stopping(engine):
        found = rehearse(engine, goal=arguments.goal, batchers=arguments.batchers)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    print_tables(found)


@contextlib.contextmanager
def stopping(engine: Engine) -> Iterator[None]:
    """Remove the stack and its volumes after the block, when it succeeded."""
    yield
    engine.remove()


def rehearse(engine: Engine, *, goal: float, batchers: int) -> dict[str, Any]:
    """Start the stack, kill its services in turn, and close its run when the goal is reached."""
    starts = start(engine, batchers=batchers)
    first = wait_for(lambda: engine.metric("trainer", "turnstream_trainer_reward_mean"), "a reward")
    kills = [kill(engine, service) for service in VICTIMS]
    last = wait_for(lambda: _at_least(goal, reward(engine)), f"a mean reward of {goal}")
    container = engine.containers("batcher")[0]
    assert engine.run_inside(container, "turnstream", "run", "close", "demo") is not None
    status = wait_for(lambda: _finished(engine.status()), "the end of the run")
    operator = json.loads(
        _json_of(engine.compose("run", "--rm", "operator", "ledger", "demo", "--json"))
    )
    return {
        "starts": starts,
        "kills": [each._asdict() for each in kills],
        "first_reward": first,
        "last_reward": last,
        "status": status,
        "ledger": operator,
        "idle": idle(engine),
    }


def start(engine: Engine, *, batchers: int) -> dict[str, float]:
    """Start the stack; return the seconds until each service was ready, and the first step."""
    began_s = time.monotonic()
    engine.compose("up", "-d", "--scale", f"batcher={batchers}")
    waiting = [*VICTIMS]
    ready: dict[str, float] = {"up": time.monotonic() - began_s}
    while waiting:
        for service in [each for each in waiting if engine.is_ready(each)]:
            ready[service] = time.monotonic() - began_s
            waiting.remove(service)
        _check(began_s, f"ready: {waiting}")
    wait_for(lambda: engine.steps() >= 1, "the first step")
    return {**ready, "first step": time.monotonic() - began_s}


def kill(engine: Engine, service: str) -> Kill:
    """SIGKILL everything in the first container of a service; return when all was well again."""
    container, before = engine.containers(service)[0], engine.steps()
    pid = engine.pid(container)
    began_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    restarted_by = "engine"
    while engine.pid(container) in (0, pid):
        if time.monotonic() - began_s > 20:
            engine.start(container)
            restarted_by = "script"
        time.sleep(0.1)
    restarted_s = time.monotonic() - began_s
    wait_for(lambda: engine.is_ready(service), f"{service} after its kill")
    ready_s = time.monotonic() - began_s
    wait_for(lambda: engine.steps() >= before + 2, f"steps after the kill of {service}")
    next_step_s = time.monotonic() - began_s
    found = Kill(service, restarted_s, ready_s, next_step_s, reward(engine) or 0.0, restarted_by)
    print(found)
    return found


def reward(engine: Engine) -> float | None:
    """Return the mean reward of the newest step, from the metrics of the trainer."""
    return engine.metric("trainer", "turnstream_trainer_reward_mean")


def idle(engine: Engine) -> dict[str, dict[str, float]]:
    """Return memory in MB, and CPU in percent of a core, of each idle service in a minute."""
    pids = {name: _processes(engine.pid(engine.containers(name)[0])) for name in IDLE}
    before = {name: sum(map(_cpu_s, each)) for name, each in pids.items()}
    time.sleep(IDLE_S)
    return {
        name: {
            "memory_mb": sum(map(_memory_mb, each)),
            "cpu_percent": 100 * (sum(map(_cpu_s, each)) - before[name]) / IDLE_S,
        }
        for name, each in pids.items()
    }


def print_tables(found: Mapping[str, Any]) -> None:
    """Print the result of `rehearse` as Markdown."""
    print("\n| service | ready after |\n|---|---|")
    for name, seconds in found["starts"].items():
        print(f"| {name} | {seconds:.1f} s |")
    print("\n| killed | restarted by | container runs | ready | two further steps | reward |")
    print("|---|---|---|---|---|---|")
    for each in (Kill(**values) for values in found["kills"]):
        times = (each.restarted_s, each.ready_s, each.next_step_s)
        words = " | ".join(f"{seconds:.1f} s" for seconds in times)
        print(f"| {each.service} | {each.restarted_by} | {words} | {each.reward:.2f} |")
    print("\n| service | memory | CPU |\n|---|---|---|")
    for name, values in found["idle"].items():
        print(f"| {name} | {values['memory_mb']:.0f} MB | {values['cpu_percent']:.2f} % |")
    ledger = {state: number for state, number in found["status"]["ledger"].items() if number}
    print(f"\naccepted {found['status']['accepted']}, ledger {ledger}")
    print(f"mean reward {found['first_reward']:.2f} -> {found['last_reward']:.2f}")


def wait_for(find: Callable[[], Any], what: str, *, timeout_s: float = 300.0) -> Any:
    """Return the first result that is neither None nor False."""
    began_s = time.monotonic()
    while (found := find()) is None or found is False:
        _check(began_s, what, timeout_s=timeout_s)
    return found


def _check(began_s: float, what: str, *, timeout_s: float = 300.0) -> None:
    """Pause before another attempt; TimeoutError after `timeout_s`."""
    if time.monotonic() - began_s > timeout_s:
        raise TimeoutError(f"no {what} within {timeout_s:.0f} s")
    time.sleep(0.2)


def _at_least(goal: float, value: float | None) -> float | None:
    return value if value is not None and value >= goal else None


def _finished(status: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the status of a finished run, once every trajectory is in its last state."""
    if status is None or any(status["ledger"][state] for state in _ENDS):
        return None
    assert sum(status["ledger"].values()) == status["accepted"], status
    return status


def _json_of(output: str) -> str:
    """Return the JSON object in an output with other lines before it."""
    return output[output.index("{") :]


def _processes(root: int) -> list[int]:
    """Return the ids of a process and of everything that it started."""
    children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    return [root, *(pid for child in children for pid in _processes(int(child)))]


def _memory_mb(pid: int) -> float:
    """Return the memory of a process; pages that several processes share count once in all."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1000


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="docker", help="docker, or podman")
    parser.add_argument("--compose", default="docker compose", help="command of compose")
    parser.add_argument("--goal", type=float, default=0.6, help="mean reward at which to stop")
    parser.add_argument("--batchers", type=int, default=2, help="batcher replicas")
    parser.add_argument("--json", type=Path, help="also write the result here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
