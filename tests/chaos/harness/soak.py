"""Random faults over a running stack: `make chaos SECONDS=1800`.

After every fault the ranks must take another step. At the end the whole run is trained and
checked. The seed is printed first, and draws the same faults again. Without `--durability` it also
draws `fsync` or `everysec`. The logs of a failed run are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from rich.console import Console

from harness.faults import FAULTS, Fault, InVainError, Stack
from harness.history import Violations
from harness.losses import refusals_have_a_cause
from harness.machine import Machine
from harness.proxy import Proxy
from harness.rig import Rig, config
from harness.stored import archive_is_what_was_trained
from turnstream.store.run.runs import close_run
from turnstream_server.embedded import Durability, EmbeddedServer
from turnstream_server.ledger.core.frontier import read_frontier

RECOVERY_S = 90.0
"""By when a step must be taken after a fault."""

MAX_STORE_BYTES = 1 << 30
"""Limit of the store's memory, enough for half an hour."""

MODES: tuple[Durability, ...] = ("fsync", "everysec")

CONFIG = config(max_staleness=8, retain_checkpoints=8, lease_s=5.0, takeover_s=3.0)
"""Trajectories of killed generators are adopted or abandoned soon."""


@dataclass(slots=True, kw_only=True)
class Report:
    """The results of a long run.

    Attributes:
        in_vain: number of faults of each kind that were drawn and took no effect.
        recoveries_s: seconds until the next step after each fault, by kind.
    """

    durability: str
    in_vain: Counter[str] = field(default_factory=Counter[str])
    recoveries_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    most_store_bytes: int = 0

    def read_memory(self, client: redis.Redis) -> None:
        """I8: assert that the store's memory is below its limit, if the store answers."""
        with contextlib.suppress(redis.RedisError, OSError):
            memory: Any = client.info("memory")
            self.most_store_bytes = max(self.most_store_bytes, memory["used_memory"])
        assert self.most_store_bytes < MAX_STORE_BYTES

    def close(self, rig: Rig) -> None:
        """Read the numbers of a run that has ended."""
        history = rig.history()
        faults = {
            fault.__name__: {
                "in_vain": self.in_vain[fault.__name__],
                "survived": len(found),
                "median_recovery_s": statistics.median(found) if found else 0.0,
                "longest_recovery_s": max(found, default=0.0),
            }
            for fault in FAULTS
            for found in [self.recoveries_s[fault.__name__]]
        }
        self.facts = {
            "durability": self.durability,
            "steps": sum(1 for _ in history.of("stepped")),
            "trainer_sessions": len(history.sessions),
            "cuts": len(rig.cuts),
            "acknowledged_trajectories": len(history.acknowledged),
            "adopted": sum(1 for _ in history.of("adopted")),
            "archived_and_released_steps": read_frontier(rig.client, rig.run).released,
            "ledger": rig.counts(),
            "most_store_bytes": self.most_store_bytes,
            "faults": faults,
        }


def soak(
    folder: Path,
    *,
    seed: int,
    durability: Durability,
    seconds: float = 1e9,
    num_faults: int = sys.maxsize,
    every_s: float = 0.0,
) -> Report:
    """Inject faults, then train all and check everything.

    Every kind of fault comes once before any comes again, `every_s` apart on the average. A
    TimeoutError says that no step was taken after a fault.
    """
    folder.mkdir(parents=True, exist_ok=True)
    machine, report = Machine(folder), Report(durability=durability)
    with (
        EmbeddedServer(
            folder / "store",
            binary=machine.binary,
            durability=durability,
            max_memory_bytes=MAX_STORE_BYTES,
        ) as server,
        Rig(folder, server, config=CONFIG) as rig,
        Proxy(server.url) as store_proxy,
        Proxy(rig.address()) as batcher_proxy,
    ):
        rig.store_url = store_proxy.url
        rig.environment["TURNSTREAM_ARCHIVE_DIR"] = str(folder / "archive")
        stack = Stack(
            rig=rig,
            machine=machine,
            store_proxy=store_proxy,
            batcher_proxy=batcher_proxy,
            rng=random.Random(seed),
            durability=durability,
        )
        stack.start()
        deadline_s = time.monotonic() + seconds
        _await_step(stack, report, after="the start")
        faults = _in_random_order(stack.rng)
        for fault in itertools.islice(faults, num_faults):
            if time.monotonic() > deadline_s:
                break
            recovery_s = _inject(fault, stack, report)
            time.sleep(max(0.0, stack.rng.uniform(0.5, 1.5) * every_s - recovery_s))
        _finish(stack, report)
    return report


def _in_random_order(rng: random.Random) -> Iterator[Fault]:
    while True:
        yield from rng.sample(FAULTS, len(FAULTS))


def _inject(fault: Fault, stack: Stack, report: Report) -> float:
    name = fault.__name__
    try:
        fault(stack)
    except InVainError:
        report.in_vain[name] += 1
        _await_step(stack, report, after=f"{name}, which was in vain")
        return 0.0
    began_s = time.monotonic()
    _await_step(stack, report, after=name)
    report.recoveries_s[name].append(time.monotonic() - began_s)
    return report.recoveries_s[name][-1]


def _await_step(stack: Stack, report: Report, *, after: str) -> None:
    before = stack.rig.count("stepped")

    def is_taken() -> bool:
        stack.mend()
        report.read_memory(stack.rig.client)
        return stack.rig.count("stepped") > before

    stack.rig.wait(is_taken, f"a step after {after}", timeout_s=RECOVERY_S)


def _finish(stack: Stack, report: Report) -> None:
    rig = stack.rig
    if rig.cuts:
        _await_resends(stack)
    for rank in rig.ranks:
        rank.kill()
    stack.mend_services()
    close_run(rig.client, rig.run)  # which ends the generators
    first = rig.checkpoint_of_store() if rig.cuts else -1
    rig.drain(2, timeout_s=30, from_step=first, num_lost=None)
    history = rig.history()
    _assert_none(refusals_have_a_cause(history))
    released = read_frontier(rig.client, rig.run).released
    folder = rig.folder / "archive"
    _assert_none(archive_is_what_was_trained(history, folder, run=rig.run, released=released))
    report.read_memory(rig.client)
    report.close(rig)


def _await_resends(stack: Stack) -> None:
    """Wait until every generator has resent what the last cut took."""
    rig = stack.rig

    def are_sent() -> bool:
        stack.mend()
        # A generator resends before it writes anything new; a closed run would refuse the resend.
        opened = [line.process for line in rig.history().of("opened") if line.at > rig.cuts[-1]]
        return all(opened.count(f"generator-{writer}") > 1 for writer in stack.generators)

    rig.wait(are_sent, "groups of every generator after a cut", timeout_s=RECOVERY_S)


def _assert_none(violations: Violations) -> None:
    found = [*violations]
    assert not found, "\n".join(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--every-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--durability", choices=MODES, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    durability = options.durability or random.Random(seed).choice(MODES)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"seed {seed}")
    folder = Path(tempfile.mkdtemp(prefix="turnstream-chaos-"))
    times = {"seconds": options.seconds, "every_s": options.every_s}
    try:
        report = soak(folder, seed=seed, durability=durability, **times)
    except BaseException:  # also of an interrupted one
        console.print(f"logs of all processes: {folder}")
        raise
    shutil.rmtree(folder)
    text = json.dumps({"seed": seed, **times, **report.facts}, indent=2)
    console.print(text)
    if options.json is not None:
        options.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
