"""The trainer of this project, with a model and real checkpoints, killed where it hurts."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from harness.rig import Rig
from testkit import group
from turnstream.generator import Publisher
from turnstream.types import Trajectory, Turn, VersionRun
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.launch.job import write_policy
from turnstream_server.launch.stack import Service
from turnstream_server.models.spec import SmallModelSpec

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 4
MODEL = SmallModelSpec(vocab_size=32, hidden_size=16, num_layers=1, num_heads=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with the same groups, whose trainer was never killed."""
    folder = tmp_path_factory.mktemp("whole")
    with EmbeddedServer(folder / "store") as server, Rig(folder, server) as rig:
        rig.start_batcher()
        _publish(rig)
        rig.join(_start_trainer(rig, "first"))
        rig.check_end()
    return folder


@pytest.mark.parametrize(
    "failpoint",
    [
        "train.after_update@3",  # Fault 16: the third update is not acknowledged
        # Fault 17: it is, and no checkpoint has it
        pytest.param("train.after_stepped@3", marks=pytest.mark.campaign),
        # Fault 18: the weights of step 4 without their token
        pytest.param("checkpoint.after_weights@2", marks=pytest.mark.campaign),
    ],
)
def test_killed_trainer_has_every_step_once_in_its_weights(
    rig: Rig, whole: Path, failpoint: str
) -> None:
    """Takes more than 5 s: three trainers with torch train the run, one undisturbed."""
    rig.start_batcher()
    _publish(rig)
    doomed = _start_trainer(rig, "first", failpoint=failpoint)
    rig.wait(lambda: doomed.status is not None, f"the death at {failpoint}")
    assert doomed.status == -signal.SIGKILL

    rig.join(_start_trainer(rig, "second"))

    first, second = _dumped(rig.folder / "first"), _dumped(rig.folder / "second")
    assert sorted(second) == [f"step-{step:06}-{part}" for step in (3, 4) for part in range(2)]
    assert first.keys() & second.keys()
    expected = _dumped(whole / "first")
    assert first.keys() | second.keys() == expected.keys()
    for dumped in (first, second):
        _assert_same_batches(dumped, expected)
    assert rig.counts() == {"accepted": 4 * NUM_STEPS * 2, "committed": 4 * NUM_STEPS * 2}
    _assert_same_weights(rig.folder, whole)


def _publish(rig: Rig) -> None:
    with Publisher(rig.server.url, rig.run) as publisher:
        for number in range(4 * NUM_STEPS):
            publisher.publish(group(f"g{number}", *_members(number)))
        publisher.close_run()


def _members(number: int) -> list[Trajectory]:
    turn = Turn(
        prompt_ids=(np.arange(5, dtype=np.int32) + number) % 32,
        response_ids=(np.arange(7, dtype=np.int32) * 3 + number) % 32,
        logprobs=np.full(7, -3.5, np.float32),
        version_runs=(VersionRun(0, 7),),
    )
    return [Trajectory(turns=[turn], sample=sample, reward=float(sample)) for sample in range(2)]


def _start_trainer(rig: Rig, dump: str, *, failpoint: str = "") -> Service:
    service = rig.stack(TURNSTREAM_FAILPOINT=failpoint).start(
        "trainer",
        f"trainer-{dump}",
        run=rig.run,
        batcher=rig.address(),
        policy=write_policy(rig.folder, MODEL),
        folder=rig.folder / "trainer",
        checkpoint_every=2,
        threads=1,
        dump=rig.folder / dump,
    )
    return rig.keep(service)


def _dumped(folder: Path) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {}
    for path in folder.glob("step-*.npz"):
        with np.load(path) as columns:
            files[path.stem] = {name: columns[name] for name in columns}
    return files


def _assert_same_batches(
    dumped: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]
) -> None:
    for name, columns in dumped.items():
        assert columns
        assert columns.keys() == expected[name].keys()
        for column, values in columns.items():
            assert np.array_equal(values, expected[name][column]), (name, column)


def _assert_same_weights(killed: Path, whole: Path) -> None:
    """Compare the last checkpoints of both folders bit for bit."""
    newest = _checkpoints(killed)[-1]
    assert json.loads((newest / "checkpoint.json").read_text())["step"] == NUM_STEPS
    before, expected = map(_weights, _checkpoints(whole))
    assert before != expected  # the last steps train something
    actual = _weights(newest)
    assert actual.keys() == expected.keys()
    assert [name for name in expected if actual[name] != expected[name]] == []


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "trainer/checkpoints").glob("step-*"))


def _weights(checkpoint: Path) -> dict[str, bytes]:
    tensors = load_file(checkpoint / "model.safetensors")
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
