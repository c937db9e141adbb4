"""Run a benchmark script as a program, in its smallest size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Measured(NamedTuple):
    """What a benchmark wrote: its results, its output, and their page of figures."""

    results: Any
    output: str
    page: str


def run_benchmark(name: str, folder: Path, *options: str) -> Measured:
    """Run `benchmarks/<name>.py` with files in a folder; `--tiny` is the default option."""
    results, page, kept = folder / f"{name}.json", folder / "page.md", folder / "kept.json"
    done = _run(f"{name}.py", *(options or ["--tiny"]), "--json", results)
    page.write_text(f"<!-- figures: {name} -->\n<!-- end of figures -->\n")
    _run("page.py", "--results", folder, "--kept", kept, "--page", page)
    return Measured(json.loads(results.read_text()), done, page.read_text())


def _run(script: str, *words: str | Path) -> str:
    command = [sys.executable, BENCHMARKS / script, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
