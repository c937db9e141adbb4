"""Recipes of the tinker-cookbook on `turnstream up`; run it with `-m campaign`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from testkit.requests.sdks import BASE
from turnstream_server.models.byte_model import byte_model_spec, write_byte_model

if TYPE_CHECKING:
    from tests.e2e.conftest import Job

pytestmark = [pytest.mark.campaign, pytest.mark.e2e]

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / "cookbook/bin/python"
RECIPES = ("rl", "rl_async")


@pytest.mark.skipif(not PYTHON.exists(), reason="no cookbook/: see examples/tinker_recipes.py")
def test_recipes_learn_and_without_a_learning_rate_fail(job: Job, tmp_path: Path) -> None:
    """Takes four minutes: each recipe trains twice for 30 steps."""
    base = tmp_path / "byte"
    write_byte_model(base, byte_model_spec())
    ports = ("--port", "0", "--store-port", "0", "--http-port", "0")
    up = job.start("up", *ports, "--base-model", f"{BASE}={base}")
    assert up.stdout is not None
    exported: dict[str, str] = {}
    while "TINKER_API_KEY" not in exported:
        line = up.stdout.readline()
        assert line, job.logs()
        if line.startswith("export "):
            name, _, value = line.split()[1].partition("=")
            exported[name] = value

    def results(*options: str) -> dict[str, str]:
        """Return the line of each recipe."""
        program = [str(PYTHON), str(ROOT / "examples/tinker_recipes.py"), *RECIPES]
        folders = ["--model", str(base), "--folder", str(tmp_path / "recipes")]
        environment = {**os.environ, **exported, "PYTHONPATH": ""}
        done = subprocess.run(
            [*program, *folders, *options],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = {line.split()[0]: line for line in done.stdout.splitlines()}
        assert {*RECIPES} <= {*lines}, done.stderr
        return lines

    learned, still = results(), results("--learning-rate", "0")

    assert [name for name, line in learned.items() if " ok " not in line] == [], learned
    assert [name for name, line in still.items() if " FAILED " in line] == [*RECIPES], still
    assert all("wanted" in still[name] for name in RECIPES), still
