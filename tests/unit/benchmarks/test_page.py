"""The page of figures is filled from what the benchmarks wrote, and from nothing else."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module("page")


@pytest.fixture(scope="module")
def figures(page: ModuleType) -> ModuleType:
    return page.figures


def block(name: str, text: str) -> str:
    return f"<!-- figures: {name} -->\n{text}<!-- end of figures -->\n"


def merge_line(**changes: Any) -> dict[str, Any]:
    line = {"job": "merge", "loop_ms": 90.0, "ours_ms": 9.0, "gain": 10.0, "goal": 8.0}
    copied = {"copy_ms": 6.0, "over_copy": 1.5, "limit_ms": 3.0, "limit_over_copy": 0.5}
    return line | copied | {"num_bytes": 2_000_000} | changes


def test_the_page_has_a_place_for_every_benchmark(page: ModuleType) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()

    places = [name for _, name, _ in page.BLOCK.findall(text)]

    assert places == [*page.PAGES]


def test_make_bench_writes_what_the_page_reads(page: ModuleType) -> None:
    text = (ROOT / "Makefile").read_text()

    written = re.findall(r"--json benchmarks/results/(\w+)\.json", text)

    assert {*written, "ledger"} == {*page.PAGES}


def test_result_replaces_its_table_and_no_other_text(page: ModuleType, tmp_path: Path) -> None:
    weight = {"end": "untrained", "group_size": 8, "trajectories": 1000}
    weight |= {"used_memory": 9.0, "memory_usage": 17.5}
    (tmp_path / "ledger.json").write_text(json.dumps([weight]))
    text = f"words\n{block('ledger', 'old figures')}more {block('stall', 'kept')}"

    filled = page.filled(text, results=tmp_path)

    assert "| untrained | 8 | 1,000 | 17.50 | 9.00 | 16 | missed |" in filled
    assert "old figures" not in filled
    assert filled.startswith("words\n")
    assert filled.endswith(f"more {block('stall', 'kept')}")
    assert page.filled(filled, results=tmp_path) == filled


def test_a_goal_that_is_missed_is_said_with_its_limit(figures: ModuleType) -> None:
    lines = [merge_line(), merge_line(job="slow", gain=6.0, over_copy=4.0)]

    text = figures.batching({"lines": lines, "growth": []})

    assert "1 of 2 jobs reach their goal against the loop; missed:" in text
    assert "- slow: 6.0 of 8 times; numpy's calls alone would be 30.0 times" in text
    assert "1 of 2 are within 2 times the copy; above:" in text
    assert "- slow: 4.0 times the copy of 2 MB; numpy's calls alone 0.5 times" in text


def test_a_job_without_a_loop_has_dashes_and_no_goal(figures: ModuleType) -> None:
    line = merge_line(job="  alone", loop_ms=None, gain=None, goal=None, limit_ms=None)

    text = figures.batching({"lines": [line], "growth": []})

    assert "| … alone | - | 9.0 | - | - | 6.0 | 1.5 | - |" in text
    assert "0 of 0 jobs reach their goal against the loop." in text


def test_whole_path_is_listed_by_process_with_its_floor(figures: ModuleType) -> None:
    rounds = [{"cpu_s": {"producer": second, "store": 0.25}} for second in (0.5, 0.75, 9.0)]
    one = {"cpu_s": 3.0, "wall_s": 2.0, "rounds": rounds}
    found = {"trajectories": 1024, "int64_bytes": 31_000_000, "one thread": one}

    text = figures.pipeline(found | {"floor_s": {"redis-py": 1.0, "numpy": 0.5}})

    assert "| one thread | 3.00 | 0.75 | 0.25 | 2.00 | 512 |" in text
    assert "the floor takes 1.500 CPU s (redis-py 1.000, numpy 0.500)" in text


def test_every_way_of_ingest_is_compared_with_the_first(figures: ModuleType) -> None:
    parts = {"client": 0.5, "gateway": 1.0, "store": 0.25}
    native = {"median_s": parts | {"total": 1.0}, "limit_s": None}
    over = {"median_s": parts | {"total": 3.5}, "limit_s": 3.0}
    within = {"median_s": parts | {"total": 1.5}, "limit_s": 1.5}

    text = figures.ingest(
        {"trajectories": 1024, "ways": {"Redis": native, "JSON": over, "Arrow": within}}
    )

    assert "| Redis | 1.00 | 0.50 | 1.00 | 0.25 | 1.0 | - |  |" in text
    assert "| JSON | 3.50 | 0.50 | 1.00 | 0.25 | 3.5 | 3.0 | missed |" in text
    assert "| Arrow | 1.50 | 0.50 | 1.00 | 0.25 | 1.5 | 1.5 | reached |" in text
