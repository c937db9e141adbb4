"""Random faults over a running stack: `make chaos SECONDS=1800`.

Half of the runs use a store with `fsync`, half with `everysec`. After every fault the ranks must
take another step. At the end the whole run is trained and checked. The seed is printed first, and
draws the same faults again. The logs of a failed run are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import secrets
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from harness.faults import FAULTS
from harness.losses import refusals_have_a_cause
from harness.machine import Machine
from harness.members import trained_prompts
from harness.proxy import Proxy
from harness.report import MAX_STORE_BYTES, Report, Survival
from harness.rig import Rig, config
from harness.running import Draws, InVainError, Stack
from harness.stored import archive_is_what_was_trained
from turnstream.store.run.evals import eval_results
from turnstream.store.run.runs import close_run
from turnstream.store.run.tasks import read_prompt_counts
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.embedded import Durability, EmbeddedServer

RECOVERY_S = 90.0
"""By when a step must be taken after a fault."""

MODES: tuple[Durability, ...] = ("fsync", "everysec")

CONFIG = config(
    max_staleness=8, retain_checkpoints=8, lease_s=5.0, takeover_s=3.0, reward_deadline_s=8.0
)
"""Trajectories of killed generators are adopted or abandoned soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long faults are injected.

    Attributes:
        seconds: for so long.
        num_faults: and no more than these.
        every_s: with so much time between them, about.
    """

    seconds: float = math.inf
    num_faults: int = sys.maxsize
    every_s: float = 0.0


def soak(
    folder: Path, *, length: Length, seed: int, durability: Durability | None = None
) -> Report:
    """Inject faults, then train all and check everything.

    Every kind of fault comes once before any comes again. The seed also draws the durability where
    none is given.

    Raises:
        TimeoutError: no step was taken after a fault.
        HistoryError: the history contradicts the promise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    durability = durability or rng.choice(MODES)
    machine = Machine(folder)
    survivals = {fault.__name__: Survival() for fault in FAULTS}
    report = Report(durability=durability, seconds=length.seconds, survivals=survivals)
    with (
        EmbeddedServer(
            folder / "store",
            binary=machine.binary,
            durability=durability,
            max_memory_bytes=MAX_STORE_BYTES,
        ) as server,
        Rig(folder, server, config=CONFIG) as rig,
        Proxy(server.url) as store,
        Proxy(rig.address()) as door,
    ):
        rig.store_url = store.url
        rig.environment["TURNSTREAM_ARCHIVE_DIR"] = str(folder / "archive")
        stack = Stack(
            rig=rig,
            machine=machine,
            store=store,
            door=door,
            draws=Draws(rng),
            durability=durability,
        )
        stack.start()
        _inject(stack, report, length=length)
        _finish(stack, report)
    return report


def _inject(stack: Stack, report: Report, *, length: Length) -> None:
    deadline_s = time.monotonic() + length.seconds
    _await_step(stack, report, after="the start")
    for number in range(length.num_faults):
        if time.monotonic() > deadline_s:
            break
        if number % 2:
            stack.strike_beside()
        fault = stack.draws.draw("faults", FAULTS)
        survival = report.survivals[fault.__name__]
        try:
            fault(stack)
        except InVainError:
            survival.num_in_vain += 1
            _await_step(stack, report, after=f"{fault.__name__}, which was in vain")
            continue
        survival.num_injected += 1
        began_s = time.monotonic()
        _await_step(stack, report, after=fault.__name__)
        survival.recoveries_s.append(time.monotonic() - began_s)
        until_next_s = stack.rng.uniform(0.5, 1.5) * length.every_s
        stack.pause(max(0.0, until_next_s - survival.recoveries_s[-1]))


def _await_step(stack: Stack, report: Report, *, after: str) -> None:
    before = stack.rig.count("stepped")

    def is_taken() -> bool:
        stack.mend()
        report.look(stack.rig.client)
        return stack.rig.count("stepped") > before

    stack.rig.wait(is_taken, f"a step after {after}", timeout_s=RECOVERY_S)


def _finish(stack: Stack, report: Report) -> None:
    """Generators stop, all that is sealed is trained, and the history is proved."""
    rig = stack.rig
    stack.ends.touch()
    for rank in rig.ranks:
        rank.kill()
    stack.mend_services()
    close_run(rig.client, rig.run)  # which ends the generators
    beside = [stack.others["observer"]]
    first = rig.checkpoint_of_store() if rig.cuts else -1
    rig.drain(2, timeout_s=30, from_step=first, num_lost=None, beside=beside)
    _check_refusals(rig)
    _check_prompts(rig)
    _check_evaluations(rig)
    _check_archive(rig)
    report.look(rig.client)
    report.close(stack)


def _check_refusals(rig: Rig) -> None:
    """Every refusal names an error, and has a cause."""
    refused = [*refusals_have_a_cause(rig.history())]
    assert not refused, refused


def _check_prompts(rig: Rig) -> None:
    """Each prompt is left, or was trained once."""
    counts = read_prompt_counts(rig.client, rig.run)
    assert counts.num_given == 0, counts
    assert counts.num_trained == len(trained_prompts(rig.history())), counts


def _check_evaluations(rig: Rig) -> None:
    """The results are of as many trajectories as the ledger says."""
    results = eval_results(rig.client, rig.run)
    assert sum(each.num_trajectories for each in results) == rig.counts().get("evaluated", 0)


def _check_archive(rig: Rig) -> None:
    """Every released step is in a file."""
    released = read_frontier(rig.client, rig.run).released
    folder = rig.folder / "archive"
    wrong = [*archive_is_what_was_trained(rig.history(), folder, run=rig.run, released=released)]
    assert not wrong, wrong


def main() -> None:
    """The long run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--every-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--durability", choices=MODES, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    console = Console()
    console.print(f"seed {seed}")
    folder = Path(tempfile.mkdtemp(prefix="turnstream-chaos-"))
    length = Length(seconds=options.seconds, every_s=options.every_s)
    try:
        report = soak(folder, length=length, seed=seed, durability=options.durability)
    except BaseException:  # also of one that somebody has stopped
        console.print(f"what every process did is kept in {folder}")
        raise
    shutil.rmtree(folder)
    console.print(report.table())
    if options.json is not None:
        text = json.dumps({"seed": seed, **report.facts()}, indent=2)
        options.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
