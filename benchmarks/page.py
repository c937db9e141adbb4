"""Write the figures of docs/benchmarks.md from the results that `make bench` left.

    make figures

Every table of the page stands between two comments, `<!-- figures: NAME -->` and
`<!-- end of figures -->`, and comes from `benchmarks/results/NAME.json`. A table without
new figures stays as it is.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures

HERE = Path(__file__).parent
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

PAGES: dict[str, Callable[[Any], str]] = {
    "pipeline": figures.pipeline,
    "ingest": figures.ingest,
    "batching": figures.batching,
    "durability": figures.durability,
    "stall": figures.stall,
    "idle": figures.idle,
    "release": figures.release,
    "failover": figures.failover,
    "shares": figures.shares,
    "training": figures.training,
    "sampling": figures.sampling,
    "tinker_api": figures.tinker_api,
    "ledger": figures.ledger,
}


def filled(text: str, *, results: Path) -> str:
    """The page with the tables of all results that are there."""

    def block(found: re.Match[str]) -> str:
        path = results / f"{found[2]}.json"
        if not path.exists():
            return found[0]
        return f"{found[1]}\n{PAGES[found[2]](json.loads(path.read_text()))}\n\n{found[3]}"

    return BLOCK.sub(block, text)


def main() -> None:
    """Fill the page in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "benchmarks.md")
    arguments = parser.parse_args()
    text = arguments.page.read_text()
    arguments.page.write_text(filled(text, results=arguments.results))


if __name__ == "__main__":
    main()
