from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

PROBE = """
import importlib.util, turnstream.generator
from turnstream.errors import TurnstreamError
for name in ("torch", "pyarrow", "grpc", "transformers", "turnstream_server"):
    if importlib.util.find_spec(name):
        print(name)
"""


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.campaign
def test_the_sdk_installs_by_itself_and_needs_no_torch_arrow_or_grpc(tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*install, REPOSITORY / "clients/python"], check=True)

    found = subprocess.run([python, "-c", PROBE], capture_output=True, check=False, text=True)

    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
