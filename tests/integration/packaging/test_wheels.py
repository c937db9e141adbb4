"""The two distributions as wheels, installed into fresh virtual environments."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

import turnstream
from turnstream_server.embedded import EmbeddedServer

REPOSITORY = Path(__file__).parents[3]
PUBLISH = """
import sys
from turnstream.batching.config import BatchingConfig
from turnstream.generator import Publisher
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run

with connect(sys.argv[1]) as client:
    create_run(client, sys.argv[2], BatchingConfig(batch_groups=1, mini_batch_groups=1))
with Publisher(sys.argv[1], run=sys.argv[2]) as publisher:
    with publisher.trajectory("g0", sample=0, num_samples=1, prompt_uid="p") as trajectory:
        trajectory.append([1, 2], [3], policy_version=0)
        trajectory.seal(reward=1.0)
print("published")
"""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment that holds no package of its own but the wheels installed into it."""

    folder: Path

    def pip(self, *arguments: str | Path) -> None:
        """Run this interpreter's pip on the environment, without a package index."""
        subprocess.run(
            [*_pip(), "--python", self._python, *arguments], check=True, capture_output=True
        )

    def run(self, code: str, *arguments: str) -> str:
        """Return what the code prints; dependencies come from the environment of the tests."""
        path = {"PYTHONPATH": sysconfig.get_path("purelib")}
        command = [self._python, "-c", code, *arguments]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, cwd=self.folder, env={**os.environ, **path}
        )
        return done.stdout.decode().strip()

    def installed(self) -> set[str]:
        """Return the paths of all installed files, relative to the folder of packages."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        files = (path.relative_to(site) for path in site.rglob("*") if path.is_file())
        return {str(path) for path in files if "__pycache__" not in path.parts}

    @property
    def _python(self) -> Path:
        return self.folder / "bin/python"


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build both distributions; return their wheels by name."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = [REPOSITORY / "clients/python", REPOSITORY]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run([*_pip(), "wheel", *options, *sources], check=True, capture_output=True)
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture
def both(tmp_path: Path, wheels: dict[str, Path]) -> Environment:
    """An environment with both distributions installed."""
    venv.create(tmp_path / "venv")
    environment = Environment(folder=tmp_path / "venv")
    environment.pip("install", "--no-deps", "--no-index", *wheels.values())
    return environment


def test_the_two_wheels_have_no_file_in_common(wheels: dict[str, Path]) -> None:
    # Both held the package `turnstream`: uninstalling one deleted files of the other.
    sdk, server = (_recorded(wheels[name]) for name in ("turnstream", "turnstream_server"))

    assert sdk & server == set()
    assert {path.split("/")[0].split("-")[0] for path in sdk} == {"turnstream"}
    assert {path.split("/")[0].split("-")[0] for path in server} == {"turnstream_server"}
    assert "turnstream/generator/outbox/lua/append.lua" in sdk
    assert "turnstream/py.typed" in sdk
    assert any(path.endswith(".lua") for path in server)


def test_the_server_wheel_requires_the_sdk_of_its_own_version(wheels: dict[str, Path]) -> None:
    sdk, server = (_metadata(wheels[name]) for name in ("turnstream", "turnstream_server"))

    assert sdk["Version"] == server["Version"] == turnstream.__version__
    assert f"turnstream[worker]=={sdk['Version']}" in server.get_all("Requires-Dist", [])


def test_either_distribution_works_when_the_other_is_uninstalled(
    both: Environment, wheels: dict[str, Path], unix_server: EmbeddedServer
) -> None:
    # Both held the package `turnstream`, and each `pip uninstall` deleted files of the other.
    both.pip("uninstall", "--yes", "turnstream")

    assert both.run("import turnstream_server; print(turnstream_server.__file__)")
    assert _recorded(wheels["turnstream_server"]) <= both.installed()
    both.pip("install", "--no-deps", "--no-index", wheels["turnstream"])
    assert both.run("import turnstream_server.cli; print('imported')") == "imported"

    both.pip("uninstall", "--yes", "turnstream-server")

    assert _recorded(wheels["turnstream"]) <= both.installed()
    assert not any(path.startswith("turnstream_server") for path in both.installed())
    assert both.run(PUBLISH, unix_server.url, "run") == "published"


def _recorded(wheel: Path) -> set[str]:
    """Return the paths in the RECORD of a wheel, without the RECORD itself."""
    with ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/RECORD"))
        lines = archive.read(name).decode().splitlines()
    return {line.split(",")[0] for line in lines} - {name}


def _metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())
