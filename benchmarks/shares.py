"""The shares of all ranks of one mini-batch, against the cost of dividing its rows once.

    python benchmarks/shares.py --json results/shares.json
    python benchmarks/shares.py --tiny          # checks that it works

CPU time of one thread, the least of several rounds, for 8 and for 64 ranks over the same rows:

    one cut         the rows divided among all ranks, and the forward passes of every rank
    shares          one cut, then the rows of every rank taken: the work of a batcher
    each rank cuts  every rank divides the rows for itself, once for its rows and once for its
                    passes: the work if ranks shared nothing
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rollouts import lengths_of, make_rows
from table import least_ms

from turnstream.batching.packing.microbatch import Budget
from turnstream.batching.rows.minibatch import (
    cut_ranks,
    rank_passes,
    rows_multiple,
    take_share,
)
from turnstream.types import Rows

BUDGET = Budget(limit=65_536)
CUT: dict[str, Any] = {"step": 1, "mini_batch": 0, "pad_token_id": 0}


def measure(rows: Rows, *, num_ranks: int, rounds: int) -> dict[str, Any]:
    """Return the CPU milliseconds of all shares of a world, with one cut and with many."""
    lengths = rows.input_ids.lengths
    multiple_of = rows_multiple(dp_world_size=num_ranks)
    own = {"dp_world_size": num_ranks, "multiple_of": multiple_of, "budget": BUDGET}

    def cut() -> list[list[int]]:
        ranks = cut_ranks(lengths, **own)
        rank_passes(lengths, ranks, budget=BUDGET)
        return ranks

    def shares() -> list[Rows]:
        return [take_share(rows, positions, **CUT) for positions in cut()]

    def each_cuts() -> list[Rows]:
        for _ in range(num_ranks):
            cut()
        return [
            take_share(rows, cut_ranks(lengths, **own)[rank], **CUT) for rank in range(num_ranks)
        ]

    found = {
        "num_ranks": num_ranks,
        "num_rows": len(rows),
        "cut_ms": least_ms(cut, rounds=rounds),
        "shares_ms": least_ms(shares, rounds=rounds),
        "each_cuts_ms": least_ms(each_cuts, rounds=1),
    }
    found["shares_per_cut"] = found["shares_ms"] / found["cut_ms"]
    found["each_cuts_per_cut"] = found["each_cuts_ms"] / found["cut_ms"]
    return found


def main() -> None:
    """Measure and print one line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a few rows, to check that it works")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    num_rows, rounds = (64, 1) if arguments.tiny else (4096, 5)
    rows = make_rows(*lengths_of("short", num_rows))
    print(
        f"{'ranks':>5} {'rows':>6} {'cut ms':>8} {'shares ms':>10} {'/ cut':>6} {'each cuts':>10}"
    )
    lines: list[dict[str, Any]] = []
    for num_ranks in (8, 64):
        line = measure(rows, num_ranks=num_ranks, rounds=rounds)
        lines.append(line)
        print(
            f"{num_ranks:5} {num_rows:6} {line['cut_ms']:8.2f} {line['shares_ms']:10.2f} "
            f"{line['shares_per_cut']:5.1f}x {line['each_cuts_per_cut']:9.1f}x",
            flush=True,
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(lines, indent=2))


if __name__ == "__main__":
    main()
