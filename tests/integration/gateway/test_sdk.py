"""Whole sessions of the real tinker SDK, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from testkit.canned_worker import CannedWorker
from testkit.gateway_thread import GatewayThread
from testkit.sdks import RELEASES, Sdk
from turnstream_server.operations.bases import BaseModel

_PROGRAM = Path(__file__).with_name("sdk_session.py")


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_a_whole_session_of_the_sdk(
    release: str,
    gateway: GatewayThread,
    worker: CannedWorker,
    base: BaseModel,
    tmp_path: Path,
):
    sdk = Sdk(release, address=gateway.address, api_key=f"tml-sdk-{release}", folder=tmp_path)

    with sdk.start([sys.executable, "-P", str(_PROGRAM), base.name]) as process:
        output, errors = process.communicate(timeout=200)

    assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(output)
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
