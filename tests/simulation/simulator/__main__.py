"""Simulate runs from seeds, and print each seed that fails.

python -m simulator --seeds 5000            seeds 0 to 4999, on every core
python -m simulator --seed 1234             one seed, with its result
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import Counter

from simulator.runs import Verdict, simulate_parallel


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time")
    asked = parser.parse_args(arguments)
    seeds = range(asked.first, asked.first + asked.seeds)
    if asked.seed is not None:
        seeds = range(asked.seed, asked.seed + 1)
    started_s = time.monotonic()
    verdicts: list[Verdict] = []
    failed: list[Verdict] = []
    with contextlib.closing(simulate_parallel(seeds, num_processes=asked.processes)) as found:
        for verdict in found:
            verdicts.append(verdict)
            if verdict.problems or asked.seed is not None:
                print(verdict, flush=True)
            if verdict.problems:
                failed.append(verdict)
            if len(failed) == asked.failures:
                break
    _sum_up(verdicts, failed, lasted_s=time.monotonic() - started_s)
    return 1 if failed else 0


def _sum_up(verdicts: list[Verdict], failed: list[Verdict], *, lasted_s: float) -> None:
    faults: Counter[str] = Counter()
    states: Counter[str] = Counter()
    for verdict in verdicts:
        faults.update(verdict.faults)
        states.update(verdict.states)
    steps = sum(verdict.num_steps for verdict in verdicts)
    batches = sum(verdict.num_batches for verdict in verdicts)
    cpu_s = sum(verdict.cpu_s for verdict in verdicts)
    print(f"{len(verdicts)} runs, {steps} steps, {batches} batches", end=" ")
    print(f"in {lasted_s:.1f} seconds, {cpu_s:.1f} of CPU")
    print("trajectories:", ", ".join(f"{n} {state}" for state, n in sorted(states.items())))
    print("faults:", ", ".join(f"{n} {fault}" for fault, n in sorted(faults.items())))
    for verdict in failed:
        print(f"FAILED: python -m simulator --seed {verdict.seed}")


if __name__ == "__main__":
    if "PYTHONHASHSEED" not in os.environ:  # a seed repeats its run in one order of sets
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    sys.exit(main())
