from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def modules_loaded_by(code: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after running `code`."""
    probe = f"{code}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (
            "import turnstream.batching",
            {"torch", "pyarrow", "grpc", "redis", "httpx", "pydantic"},
        ),
        (
            "import turnstream.generator",
            {"torch", "pyarrow", "grpc", "pydantic", "turnstream_server"},
        ),
        ("import turnstream_server.cli", {"torch", "pyarrow", "grpc", "transformers"}),
        (
            "import turnstream_server.jobs.demo, turnstream_server.jobs.replay",
            {"torch", "transformers"},
        ),
    ],
)
def test_an_import_loads_nothing_heavy(code: str, absent: set[str]) -> None:
    assert modules_loaded_by(code) & absent == set()


def test_every_batching_module_is_as_light_as_the_package() -> None:
    folder = REPOSITORY / "clients/python/src/turnstream/batching"
    names = [f"turnstream.batching.{path.stem}" for path in folder.glob("[!_]*.py")]

    loaded = modules_loaded_by(f"import {', '.join(names)}")

    assert not loaded & {"torch", "pyarrow", "grpc", "redis", "httpx", "pydantic"}


def test_the_server_depends_on_all_that_the_sdk_inside_it_needs() -> None:
    root = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    sdk = tomllib.loads((REPOSITORY / "clients/python/pyproject.toml").read_text())["project"]

    needed = {*sdk["dependencies"], *sdk["optional-dependencies"]["worker"]}

    assert needed <= set(root["dependencies"])


def test_make_alone_lists_every_target() -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory"], cwd=REPOSITORY, capture_output=True, check=True, text=True
    ).stdout

    targets = ("setup", "demo", "test", "check", "bench", "proto")
    assert all(f"make {target} " in shown for target in targets)


def test_ci_runs_make_test_and_says_that_it_is_ci(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "make $* with CI=$CI in $(pwd)"\n')
    make.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    shown = subprocess.run(
        [REPOSITORY / ".ci/run"], env=environment, capture_output=True, check=True, text=True
    ).stdout

    assert shown == f"make test with CI=true in {REPOSITORY}\n"
