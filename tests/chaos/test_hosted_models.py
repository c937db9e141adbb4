"""Services of hosted models killed in a run of the real tinker SDK: nothing is lost or repeated."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any, Final

import pytest

from harness.rig import Rig
from testkit.requests.sdks import BASE
from turnstream_server.launch.stack import Service
from turnstream_server.launch.up import API_KEY
from turnstream_server.models.byte_model import byte_model_spec, write_byte_model
from turnstream_server.operations.checkpoints import CheckpointPath, folder_of
from turnstream_server.operations.models import read_bases

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(900)]

NUM_ROUNDS: Final = 13
RUN_S: Final = 480.0
"""Limit of a run. The SDK repeats a submit for 5 minutes, and then raises."""

KILLS: Final = {
    "engine": [
        "engine.after_run@11",  # a step and a gradient are lost; the gradient has no result
        "engine.before_cover@2",  # load_weights has written a checkpoint that the log does not name
        "engine.after_finish@5",  # the result is written, and its effect is lost
    ],
    "gateway": [
        "gateway.after_submit@3",  # the client submits the command again
        "gateway.after_submit@20",
    ],
}
"""Places at which each process of a service kills itself, one after another."""


def test_killed_gateway_and_engine_lose_nothing(rig: Rig) -> None:
    write_byte_model(rig.folder / "byte", byte_model_spec(hidden_size=32))
    rig.start_batcher()
    _start(rig, "sampler")
    services = {name: _start(rig, name, places[0]) for name, places in KILLS.items()}
    rig.wait(lambda: read_bases(rig.client), "a base model")
    rig.wait(lambda: "listens" in services["gateway"].log_path.read_text(), "the gateway")
    disturbed = _start_recipe(rig, "disturbed")
    deaths = dict.fromkeys(KILLS, 0)

    def has_ended() -> bool:
        for name, service in services.items():
            if service.status is not None:
                assert service.status == -signal.SIGKILL, service.failure(f"{name} ended otherwise")
                deaths[name] += 1
                services[name] = _start(rig, name, [*KILLS[name], ""][deaths[name]])
        return disturbed.status is not None

    rig.wait(has_ended, "the end of the disturbed run", timeout_s=RUN_S)
    received, weights = _result(rig, disturbed)

    assert deaths == {name: len(places) for name, places in KILLS.items()}
    expected, expected_weights = _result(rig, _start_recipe(rig, "undisturbed"))
    assert len(expected) > 2 * NUM_ROUNDS
    assert received == expected
    assert weights == expected_weights


def _start(rig: Rig, name: str, failpoint: str = "") -> Service:
    own = {"base_model": f"{BASE}={rig.folder / 'byte'}", "folder": rig.folder / "models"}
    options: dict[str, dict[str, Any]] = {
        "gateway": {"listen": rig.address("gateway")},
        "engine": {**own, "checkpoint_every": 3, "threads": 1},
        "sampler": {**own, "threads": 1},
    }
    stack = rig.stack(TURNSTREAM_FAILPOINT=failpoint, OMP_NUM_THREADS="1")
    return rig.keep(stack.start(name, name, **options[name]))


def _start_recipe(rig: Rig, name: str) -> Service:
    address = f"http://{rig.address('gateway')}"
    stack = rig.stack(TINKER_BASE_URL=address, TINKER_API_KEY=API_KEY, TINKER_TELEMETRY="0")
    words = ["-P", "-m", "harness.hosted_recipe", BASE, str(NUM_ROUNDS)]
    return rig.keep(stack.start_program(name, [sys.executable, *words]))


def _result(rig: Rig, recipe: Service) -> tuple[list[Any], bytes]:
    """Return the results that the client has received, and the bytes of the saved weights."""
    recipe.wait(RUN_S)
    recipe.check()
    lines = [each for each in recipe.log_path.read_text().splitlines() if each.startswith("{")]
    result = json.loads(lines[-1])
    folder = rig.folder / "models" / folder_of(CheckpointPath.parse(result["path"]))
    return result["received"], (folder / "adapter_model.safetensors").read_bytes()
