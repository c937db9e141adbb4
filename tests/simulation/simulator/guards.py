"""Breaks the guards of the scripts and of the code one by one, and counts the lives that show it.

python -m simulator.guards                            every guard, on every core
python -m simulator.guards --seeds 200 append: fold:  those whose name begins so
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from simulator.breaks import Guard
from simulator.code_guards import CODE_GUARDS
from simulator.lives import lives
from simulator.script_guards import SCRIPT_GUARDS

GUARDS = (*SCRIPT_GUARDS, *CODE_GUARDS)


class Sight(NamedTuple):
    """The runs that a broken guard let fail.

    Attributes:
        seeds: seeds of these runs.
        problem: problem of the first of them.
    """

    seeds: tuple[int, ...]
    problem: str


def guard_of(name: str) -> Guard:
    """The guard of this name."""
    (guard,) = [each for each in GUARDS if each.name == name]
    return guard


def first_seed(guard: Guard, seeds: range) -> int | None:
    """The first of these lives that shows that a guard is broken."""
    with guard.broken():
        for verdict in lives(guard.lives_of(seeds)):
            if verdict.problems:
                return verdict.seed
    return None


def sight(name: str, seeds: range) -> Sight:
    """Every one of these lives that shows it."""
    guard = guard_of(name)
    with guard.broken():
        failed = [verdict for verdict in lives(guard.lives_of(seeds)) if verdict.problems]
    shown = failed[0].problems[0].strip().splitlines() if failed else [""]
    is_traceback = shown[0].startswith("Traceback")
    return Sight(tuple(each.seed for each in failed), shown[-1 if is_traceback else 0])


def main(arguments: list[str] | None = None) -> int:
    """Break them; 1 where one was not seen."""
    parser = argparse.ArgumentParser(prog="python -m simulator.guards", description=__doc__)
    parser.add_argument("names", nargs="*", help="how they begin")
    parser.add_argument("--seeds", type=int, default=400, help="how many lives")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time")
    asked = parser.parse_args(arguments)
    seeds = range(asked.first, asked.first + asked.seeds)
    names = [each.name for each in GUARDS if each.name.startswith((*asked.names,) or ("",))]
    num_unseen = 0
    started_anew = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.processes, mp_context=started_anew) as executor:
        for name, seen in zip(names, executor.map(partial(_sight, seeds), names), strict=True):
            num_unseen += not seen.seeds
            first = seen.seeds[0] if seen.seeds else "-"
            shown = (
                f"{len(seen.seeds):>4} of {len(guard_of(name).lives_of(seeds))}, first {first:>4}"
            )
            print(f"{shown}  {name}  ({seen.problem[:100] or 'unseen'})", flush=True)
    return 1 if num_unseen else 0


def _sight(seeds: range, name: str) -> Sight:
    return sight(name, seeds)


if __name__ == "__main__":
    from simulator.guards import main as start  # a spawned process imports this one

    sys.exit(start())
