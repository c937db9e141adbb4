"""What importing a part of the SDK loads. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"pyarrow", "grpc", "torch", "redis", "httpx", "hypothesis", "pydantic"}


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("turnstream.records.turns", set()),
        ("turnstream.records.events", set()),
        ("turnstream.records.manifests", set()),
        ("turnstream.records.configs", set()),
        ("turnstream.records.statuses", set()),
        ("turnstream.records.batches", {"pyarrow"}),
    ],
)
def test_a_module_loads_no_heavy_library_that_it_does_not_need(module: str, allowed: set[str]):
    script = f"import sys, {module}; print(*sys.modules)"

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert not result.stderr
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert loaded & HEAVY <= allowed
