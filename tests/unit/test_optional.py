"""A missing extra is one error with the command that installs it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from turnstream.errors import MissingExtraError, TurnstreamError
from turnstream.optional import from_extra

WITHOUT = """
import sys
sys.modules[{package!r}] = None
try:
    {act}
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("package", "act", "command"),
    [
        ("grpc", "import turnstream.worker", "turnstream[worker]"),
        ("pyarrow", "from turnstream.worker import BatchStream", "turnstream[worker]"),
        (
            "torch",
            "from turnstream.worker import PulledMiniBatch; PulledMiniBatch.to_torch(None)",
            "turnstream[torch]",
        ),
    ],
)
def test_missing_package_names_the_command_that_installs_it(
    package: str, act: str, command: str
) -> None:
    code = WITHOUT.format(package=package, act=act)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stdout.startswith("MissingExtraError ")
    assert f"needs the package {package}" in done.stdout
    assert f"pip install '{command}'" in done.stdout


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_trainer_without_its_packages_is_one_line(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from turnstream_server import cli\n"
        "sys.argv = ['turnstream', 'serve', 'trainer', '--run', 'a', '--folder', 'b',"
        " '--preset', 'guessing', '--batcher', 'c:1', '--redis', 'redis://127.0.0.1:1']\n"
        "cli.main()"
    )
    environment = {**os.environ, "TURNSTREAM_START_WAIT_S": "0"}

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )

    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"needs the package {package}: pip install 'turnstream-server[trainer]'" in done.stderr


def test_error_is_an_import_error_and_survives_pickling() -> None:
    with pytest.raises(ImportError) as caught, from_extra("worker", needed_by="run.batches()"):
        raise ModuleNotFoundError("No module named 'grpc'", name="grpc")

    assert isinstance(caught.value, TurnstreamError)
    assert isinstance(caught.value, MissingExtraError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.needed_by, again.package, again.extra) == ("run.batches()", "grpc", "worker")


def test_missing_module_of_turnstream_itself_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError), from_extra("worker", needed_by="x"):
        raise ModuleNotFoundError("No module named 'turnstream.x'", name="turnstream.x")
