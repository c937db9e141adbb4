"""Keep the results that `make bench` left in docs/benchmarks.json, and print its page.

    make figures

Every table of docs/benchmarks.md stands between two comments, `<!-- figures: NAME -->` and
`<!-- end of figures -->`, and comes from NAME in docs/benchmarks.json. The results of
`benchmarks/results/NAME.json` replace those of the name. A table without results stays as it is.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import figures
import path_figures

HERE = Path(__file__).parent
RESULTS = HERE / "results"
KEPT = HERE.parent / "docs" / "benchmarks.json"
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

PAGES: dict[str, Callable[[Any], str]] = {
    "pipeline": path_figures.pipeline,
    "latency": path_figures.latency,
    "peers": path_figures.peers,
    "cold": path_figures.cold,
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


def read_results(folder: Path) -> dict[str, Any]:
    """Return the results of a folder by the name of their benchmark."""
    paths = {name: folder / f"{name}.json" for name in PAGES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def read_kept(path: Path) -> dict[str, Any]:
    """Return the kept results; none where there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def filled(text: str, results: Mapping[str, Any]) -> str:
    """The page with the tables of all results that are there."""

    def block(found: re.Match[str]) -> str:
        if found[2] not in results:
            return found[0]
        return f"{found[1]}\n{PAGES[found[2]](results[found[2]])}\n\n{found[3]}"

    return BLOCK.sub(block, text)


def main() -> None:
    """Keep new results, and fill the page in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--kept", type=Path, default=KEPT)
    parser.add_argument("--page", type=Path, default=KEPT.with_suffix(".md"))
    arguments = parser.parse_args()
    results = read_kept(arguments.kept) | read_results(arguments.results)
    arguments.kept.write_text(json.dumps(results, indent=1) + "\n")
    arguments.page.write_text(filled(arguments.page.read_text(), results))


if __name__ == "__main__":
    main()
