"""Libraries that the import of a part of the SDK loads, each in its own process."""

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
def test_module_loads_no_unneeded_heavy_library(module: str, allowed: set[str]):
    script = f"import sys, {module}; print(*sys.modules)"

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert not result.stderr
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert loaded & HEAVY <= allowed
