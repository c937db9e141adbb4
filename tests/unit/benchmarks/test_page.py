"""The page of figures is filled from what the benchmarks wrote, and from nothing else."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


def program(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return program("page")


def block(name: str, text: str) -> str:
    return f"<!-- figures: {name} -->\n{text}<!-- end of figures -->\n"


def test_the_page_has_a_place_for_every_benchmark(page: ModuleType) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()

    places = [name for _, name, _ in page.BLOCK.findall(text)]

    assert places == [*page.PAGES]


def test_make_bench_writes_what_the_page_reads(page: ModuleType) -> None:
    text = (ROOT / "Makefile").read_text()

    written = re.findall(r"--json benchmarks/results/(\w+)\.json", text)

    assert {*written, "ledger"} == {*page.PAGES}


def test_result_replaces_its_table_and_no_other_text(page: ModuleType) -> None:
    weight = {"end": "untrained", "group_size": 8, "trajectories": 1000}
    weight |= {"used_memory": 9.0, "memory_usage": 17.5}
    text = f"words\n{block('ledger', 'old figures')}more {block('stall', 'kept')}"

    filled = page.filled(text, {"ledger": [weight]})

    assert "| untrained | 8 | 1,000 | 17.50 | 9.00 | 16 | missed |" in filled
    assert "old figures" not in filled
    assert filled.startswith("words\n")
    assert filled.endswith(f"more {block('stall', 'kept')}")
    assert page.filled(filled, {"ledger": [weight]}) == filled


def test_gate_names_what_is_15_percent_worse_and_reads_all_kept_ratios(page: ModuleType) -> None:
    gate = program("gate")
    kept = {"a": 2.0, "b": 1.0, "c": 0.05, "gone": 1.0}

    worse = gate.compared(kept, {"a": 2.29, "b": 1.16, "c": 0.065, "new": 9.0})

    assert worse == ["b: 1.16, kept 1.00: 16 % worse"]
    assert gate.compared(kept, {"a": 9.0, "b": 2.0})[0].startswith("a: 9.00, kept 2.00: 350 %")
    ratios = gate.ratios(page.read_kept(page.KEPT))
    assert {name.partition(":")[0] for name in ratios} >= {"pipeline", "cold"}
    assert gate.compared(ratios, ratios) == []
