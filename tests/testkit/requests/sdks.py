"""Releases of the tinker SDK, each in a folder of its own, as `make setup` puts them there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from testkit.services.forked import popen
from turnstream_server.operations.checkpoints import CheckpointPath, folder_of

NEWEST: Final = "0.38.0"
"""Release in the environment of the tests."""

OLDER: Final = ("0.25.0", "0.22.7", "0.16.1")
"""Releases in `.sdk/<release>`. Their dependencies are those of the newest one."""

RELEASES: Final = (NEWEST, *(pytest.param(each, marks=pytest.mark.campaign) for each in OLDER))
"""Parameters of a test that runs with each release; with older ones in the campaign."""

_ROOT: Final = Path(__file__).parents[3]
_PROGRAM: Final = _ROOT / "tests/e2e/tinker/sdk_program.py"


BASE: Final = "tiny/byte"
"""Name of the base model."""


class Hosting(NamedTuple):
    """Processes that serve the base model `BASE`; `folder` is the SDK's working directory."""

    address: str
    base: Path
    folder: Path
    shared: Path
    store_url: str = ""

    def saved(self, path: str) -> Path:
        """Return the folder of a saved checkpoint."""
        return self.shared / folder_of(CheckpointPath.parse(path))


class Sdk:
    """A release of the SDK that talks to a gateway, in a process of its own per call.

    Args:
        release: one of `NEWEST` and `OLDER`; the test is skipped where it is not installed.
    """

    def __init__(self, release: str, *, address: str, api_key: str, folder: Path) -> None:
        self.release = release
        self._folder = folder
        self._environment = {
            **os.environ,
            "TINKER_BASE_URL": f"http://{address}",
            "TINKER_API_KEY": api_key,
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if release != NEWEST:
            self._environment["PYTHONPATH"] = str(_installed(release))

    def run(self, base_model: str, scenario: str, **arguments: Any) -> Any:
        """Return the result of one scenario of `sdk_program.py`; its error fails the test."""
        (result,) = self.run_all(base_model, [(scenario, arguments)])
        return result

    def run_all(
        self, base_model: str, scenarios: Sequence[tuple[str, dict[str, Any]]]
    ) -> list[Any]:
        """Return the results of scenarios that one client runs in this order."""
        request = json.dumps({"base_model": base_model, "scenarios": scenarios})
        with self.start([sys.executable, "-P", str(_PROGRAM)]) as process:
            try:
                output, errors = process.communicate(request)
            finally:
                process.kill()
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert process.returncode == 0, errors[-4000:]
        failed = [line for line in lines if "error" in line]
        assert not failed, f"SDK {self.release}: {failed}\n{errors[-2000:]}"
        return [line["result"] for line in lines]

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a program in the environment of this release, with pipes."""
        start = popen if self.release == NEWEST else subprocess.Popen
        return start(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def _installed(release: str) -> Path:
    """Return the folder of a release. On CI it must be there."""
    folder = _ROOT / ".sdk" / release
    if not (folder / "tinker").is_dir():
        message = f"tinker {release} is not installed: make setup"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return folder
