"""The program of docs/tinker-api.md runs as printed, with its commands and the SDK of tinker."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs/tinker-api.md"
CLI = [sys.executable, "-P", "-m", "turnstream_server.cli"]

pytestmark = [pytest.mark.grpc, pytest.mark.redis, pytest.mark.campaign]


def test_tinker_api_runs_as_printed(
    own_folder: Path,
    up: Callable[..., contextlib.AbstractContextManager[Path]],
    open_page: Callable[[Path], Any],
) -> None:
    page = open_page(PAGE)
    [(_, code)] = page.blocks()
    lines = page.text.partition("```\n")[2].partition("```")[0].splitlines()
    make_model, start_up, *exports = [line.partition("#")[0].strip() for line in lines]

    subprocess.run([*CLI, *make_model.split()[1:]], check=True)
    with up(*start_up.split()[2:]) as output:
        printed = output.read_text().splitlines()
        assert all(line in printed for line in exports)
        variables = dict(line.removeprefix("export ").split("=", 1) for line in exports)
        program = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )

    *losses, samples = program.stdout.splitlines()
    assert float(losses[-1]) < float(losses[0]) / 3
    assert samples.startswith("b' quick")
