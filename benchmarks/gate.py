"""Compare the ratios of new results with those of docs/benchmarks.json, and name the worse ones.

    make bench

Seconds belong to a machine, so only ratios of one run are compared: multiples of a floor or of a
baseline, least first. A ratio that is more than 15 % worse ends the program with status 1.
`make figures` keeps the new results instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from page import KEPT, RESULTS, read_kept, read_results

WORSE: Final = 1.15
LEAST: Final = 0.02
"""A difference below this is the resolution of the clock, such as that of an empty import."""

Ratios = Iterator[tuple[str, float]]


def compared(kept: Mapping[str, float], new: Mapping[str, float]) -> list[str]:
    """Return a line for each ratio that is worse than the kept one, the worst first.

    A smaller ratio is a better one. A ratio that only one side has is not compared.

    >>> compared({"path": 2.0, "start": 0.08}, {"path": 2.4, "start": 0.099, "more": 9.0})
    ['path: 2.40, kept 2.00: 20 % worse']
    """
    worse = {
        name: new[name] / kept[name]
        for name in kept.keys() & new.keys()
        if new[name] > max(kept[name] * WORSE, kept[name] + LEAST)
    }
    return [
        f"{name}: {new[name]:.2f}, kept {kept[name]:.2f}: {(times - 1) * 100:.0f} % worse"
        for name, times in sorted(worse.items(), key=lambda item: (-item[1], item[0]))
    ]


def ratios(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratios of all results by their name; for each, smaller is better.

    >>> ratios({"shares": [{"num_ranks": 8, "shares_per_cut": 1.5}], "idle": {}})
    {'shares: 8 ranks, times one cut': 1.5}
    """
    return {
        f"{name}: {ratio}": value
        for name, read in _READERS.items()
        if name in results
        for ratio, value in read(results[name])
    }


def _pipeline(found: Any) -> Ratios:
    floor_s = sum(found["floor_s"].values())
    for title, each in found.items():
        if isinstance(each, dict) and "cpu_s" in each:
            yield f"{title}, times the floor", each["cpu_s"] / floor_s
    if growth := found.get("growth"):
        times = growth["grown_s"] / growth["once_s"]
        yield f"{growth['growth']} times the work, times the CPU", times
    for num, each in found["agentic"]["publishers"].items():
        for stage in ("producer", "store", "batcher"):
            turn_us = each["turn_us"][stage]
            name = f"agentic, {num} publishers, {stage} of a turn, times the floor"
            yield name, turn_us / each["floor_us"][stage]


def _peers(found: Any) -> Ratios:
    for way, times in found["times"].items():
        yield f"ours, times TransferQueue {way}", 1 / times


def _cold(found: Any) -> Ratios:
    for name, seconds in found["cpu_s"].items():
        yield f"{name}, times the floor", seconds / found["floor_s"]


def _ingest(found: Any) -> Ratios:
    native_s = found["ways"]["SDK over Redis"]["median_s"]["total"]
    for way, each in found["ways"].items():
        yield f"{way}, times Redis", each["median_s"]["total"] / native_s


def _batching(found: Any) -> Ratios:
    for line in found["lines"]:
        if line["goal"] is not None:
            yield f"{line['job']}, times its limit", line["ours_ms"] / line["limit_ms"]


def _shares(found: Any) -> Ratios:
    for line in found:
        yield f"{line['num_ranks']} ranks, times one cut", line["shares_per_cut"]


_READERS: Final[dict[str, Callable[[Any], Ratios]]] = {
    "pipeline": _pipeline,
    "peers": _peers,
    "cold": _cold,
    "ingest": _ingest,
    "batching": _batching,
    "shares": _shares,
}


def main() -> None:
    """Print the worse ratios; exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--kept", type=Path, default=KEPT)
    arguments = parser.parse_args()
    new, kept = ratios(read_results(arguments.results)), ratios(read_kept(arguments.kept))
    worse = compared(kept, new)
    print(f"{len(kept.keys() & new.keys())} ratios compared, {len(worse)} worse")
    print("\n".join(worse))
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
