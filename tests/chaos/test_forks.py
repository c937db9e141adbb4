"""A run forked from a checkpoint while it trains: both go on, each with its own generators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.rig import CONFIG, ENDLESS, Rig
from turnstream.types import RecoveryToken
from turnstream_server.bus.forks import fork_run
from turnstream_server.bus.manifests import StoredManifest, read_plan
from turnstream_server.bus.states import read_states
from turnstream_server.embedded import EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Rig]:
    """A run that trains, with a checkpoint after every step."""
    with (
        EmbeddedServer(tmp_path / "store") as server,
        Rig(tmp_path / "a", server, run="a") as rig,
    ):
        rig.start_batcher()
        rig.start_generator(groups=ENDLESS, pause_s=0.1)
        rig.start_ranks(1, checkpoint_every=1)
        rig.wait_for_lines("committed", 3)
        yield rig


def plan(rig: Rig, step: int) -> StoredManifest:
    stored = read_plan(rig.client, rig.run, step)
    assert stored is not None
    return stored


def copy_checkpoint(origin: Rig, folder: Path, *, step: int) -> tuple[RecoveryToken, list[str]]:
    """What an operator does: the checkpoint goes to the folder of the new trainer."""
    folder.mkdir(parents=True)
    for suffix in ("weights", "token"):
        path = origin.folder / "trainer" / f"{step:06}.{suffix}"
        (folder / path.name).write_bytes(path.read_bytes())
    token = RecoveryToken.parse((folder / f"{step:06}.token").read_text())
    return token, json.loads((folder / f"{step:06}.weights").read_text())


def test_a_run_and_its_fork_from_a_checkpoint_both_train_on(origin: Rig, tmp_path: Path) -> None:
    token, weights = copy_checkpoint(origin, tmp_path / "b/trainer", step=2)
    last = plan(origin, 2)
    announced = [line["version"] for line in origin.history().of("announced")]

    fork_run(origin.client, "a", "b", token)  # while "a" trains
    with Rig(tmp_path / "b", origin.server, config=CONFIG, run="b") as fork:
        fork.start_generator("v", groups=24)  # of the same names as those of "a"
        fork.join(fork.start_ranks(1, target=origin.address(), checkpoint_every=1, max_steps=6))
        history, states = fork.history(), read_states(fork.client, "b")
        (done,) = [line for line in history.of("done") if "weights" in line.facts]  # the rank
        received = list(history.of("received"))
        plans = [plan(fork, step) for step in range(3, 7)]
    origin.ranks[0].kill()
    origin.close_run()
    origin.drain()  # the invariants of "a" hold, as if nobody had forked it

    assert [*dict.fromkeys(line["step"] for line in received)] == [3, 4, 5, 6]
    assert done["weights"] == [*weights, *(each.hash for each in plans)]
    assert weights[-1] == token.chain_hash == last.hash == plans[0].manifest.previous_hash
    assert plans[0].manifest.lineage == "a@2"
    assert received[0]["rows"][0]["row"] == last.manifest.end_row_id
    assert min(line["version"] for line in history.of("announced")) > max(announced)
    states.counts.check()
    assert states.frontier.origin is not None
