"""Whole sessions of the real tinker SDK, in a process of its own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testkit.canned_worker import CannedWorker
from testkit.gateway_thread import GatewayThread
from turnstream_server.commands.bases import BaseModel

_PROGRAM = Path(__file__).with_name("sdk_session.py")


def interpreter(release: str) -> str:
    """Return a Python with a release of the SDK; the test is skipped where there is none.

    `TURNSTREAM_SDK_0_38_0` names that of release 0.38.0.
    """
    variable = f"TURNSTREAM_SDK_{release.replace('.', '_')}"
    if named := os.environ.get(variable):
        return named
    try:
        if importlib.metadata.version("tinker") == release:
            return sys.executable
    except importlib.metadata.PackageNotFoundError:
        pass
    pytest.skip(f"no tinker {release}: name an interpreter with it in {variable}")


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.38.0", "0.25.0", "0.22.7", "0.16.1"])
def test_a_whole_session_of_the_sdk(
    release: str, gateway: GatewayThread, worker: CannedWorker, base: BaseModel
):
    python, key = interpreter(release), f"tml-sdk-{release}"
    environment = {
        **os.environ,
        "TINKER_BASE_URL": gateway.base_url,
        "TINKER_API_KEY": key,
        "HF_HUB_OFFLINE": "1",
    }

    done = subprocess.run(
        [python, "-P", _PROGRAM, base.name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    model = found["info"][0]
    assert found["release"] == release
    assert base.name in found["served"]
    assert found["info"] == [model, base.name, 8]
    assert found["forward"] == [[-3.0, -4.0]]
    assert found["backward"] == [[-1.0, -2.0], [-2.0, -3.0]]
    assert (found["loss"], found["step"]) == (8.0, {"learning_rate": 0.5})
    assert "datum 0, model_input: token 0 is 100000" in found["refused"]
    assert found["sampled"] == [["length", [7, 7, 7], [-1.0, -1.0, -1.0]]] * 2
    assert found["logprobs"] == [None, -6.0, -7.0]
    assert "max_tokens is 1000" in found["too_long"]
    assert found["by_path"] == [7, 7, 7]
    assert found["resumed"] == [[-4.0, -5.0]]
    assert sorted(found["runs"]) == [model, model.replace(":train:0", ":train:1")]
    assert found["checkpoints"] == ["sampler_weights/n1", "weights/s1"]
    assert found["left"] == [["weights/s1", True]]
