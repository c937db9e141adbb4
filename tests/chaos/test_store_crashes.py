"""Faults of the store: killed under load, and cut off from power."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.machine import Machine
from harness.rig import ENDLESS, PATIENCE_S, Rig, config
from harness.stored import lost_with
from turnstream_server.embedded import find_binary
from turnstream_server.launch.stack import Service

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(600)]

StartRig = Callable[..., Rig]
UNHINDERED = config(max_staleness=1000)
"""No generator waits for a trainer."""


def kind_of_server(kind: str) -> Path:
    if kind == "valkey":
        return find_binary()
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server is installed")
    return Path(found)


@pytest.mark.parametrize(
    ("kind", "durability", "loses_power"),
    [
        *((kind, mode, False) for kind in ("valkey", "redis") for mode in ("fsync", "everysec")),
        ("valkey", "fsync", True),
    ],
)
def test_server_killed_under_load_keeps_acknowledged_writes(
    start_rig: StartRig, tmp_path: Path, kind: str, durability: str, loses_power: bool
) -> None:
    # Faults 6 and 7: three kills, and every service continues without a restart. A power cut also
    # takes what had not reached the disk. Acknowledged data are read before any process can resend
    # them.
    machine = Machine(tmp_path, server=kind_of_server(kind))
    if durability == "everysec":
        machine.freeze_disk()  # during a longer sync, a server answers before it writes
    rig = start_rig(binary=machine.binary, durability=durability)
    batcher = rig.start_batcher()
    generators = [rig.start_generator(f"w{n}", groups=ENDLESS, pause_s=0.1) for n in range(2)]
    rig.start_ranks(1, checkpoint_every=1)

    for number in range(2):
        rig.wait_for_lines("committed", number + 1)
        rig.server.kill()
        data = rig.server.data_dir
        if loses_power:
            machine.lose_power(data)
        assert lost_with(data, rig.history(), run=rig.run, binary=machine.binary) == []
        rig.server.restart()
    rig.wait_for_lines("committed", 4)

    assert [service.status for service in (batcher, rig.ranks[0])] == [None, None]
    rig.close_run()
    rig.join(generators)
    rig.drain()


def _start_endless_generators(rig: Rig) -> list[Service]:
    """Two that keep what they were answered for longer than a test takes."""
    return [rig.start_generator(f"w{n}", groups=ENDLESS, pause_s=0.2, keep_s=600) for n in range(2)]


def _wait_for_all(rig: Rig, generators: Sequence[Service], kind: str) -> None:
    """Wait until each generator has logged two more lines, the second of a later call."""
    before = Counter(line.process for line in rig.history().of(kind))

    def is_so() -> bool:
        now = Counter(line.process for line in rig.history().of(kind))
        return all(now[each.name] >= before[each.name] + 2 for each in generators)

    rig.wait(is_so, f"two {kind!r} of every generator")


def test_power_cut_under_everysec_costs_running_generators_nothing(
    start_rig: StartRig, tmp_path: Path
) -> None:
    # Fault 7: the writers resend acknowledged data that were never synced.
    machine = Machine(tmp_path)
    rig = start_rig(binary=machine.binary, config=UNHINDERED)
    _wait_for_sync(rig, machine)  # the run itself is on the disk
    batcher = rig.start_batcher()
    generators = _start_endless_generators(rig)
    num_lost: list[int] = []

    for _ in range(2):
        machine.freeze_disk()
        _wait_for_all(rig, generators, "sealed")
        rig.server.kill()
        num_lost.append(machine.lose_power(rig.server.data_dir))
        rig.server.restart()
    _wait_for_all(rig, generators, "opened")
    rig.close_run()
    rig.join(generators)

    assert min(num_lost) > 0
    assert batcher.status is None
    assert [line["restarts"] for line in rig.history().of("done")] == [2, 2]
    rig.loses_plans = True
    rig.drain()
    assert rig.counts() == dict.fromkeys(("accepted", "committed"), rig.count("sealed"))


def _wait_for_sync(rig: Rig, machine: Machine) -> None:
    """Until all is on disk that is answered now, also what the server holds back while it syncs."""
    persistence: Any = rig.client.info("persistence")
    size = persistence["aof_current_size"] + persistence["aof_buffer_length"]
    rig.wait(lambda: machine.synced(rig.server.data_dir) >= size, "a sync")


@pytest.mark.parametrize("batcher", ["batcher", "follower"])
def test_trainer_ahead_of_a_store_after_a_power_cut_gets_an_error(
    start_rig: StartRig, tmp_path: Path, batcher: str
) -> None:
    # Fault 7: its token is the authority, and the difference has a name. The batchers live on with
    # plans in memory that the store has lost, the one that leads and the one that follows.
    machine = Machine(tmp_path)
    rig = start_rig(binary=machine.binary)
    rig.start_batcher()
    rig.start_batcher("follower")
    target = rig.address(batcher)
    rig.join(rig.start_generator("kept", groups=4))
    rig.join(rig.start_ranks(1, target=target, checkpoint_every=1, max_steps=1))
    _wait_for_sync(rig, machine)
    machine.freeze_disk()
    rig.loses_history = True
    rig.join(rig.start_generator("lost", groups=16))
    rig.join(rig.start_ranks(1, target=target, checkpoint_every=1, max_steps=4))

    rig.server.kill()
    machine.lose_power(rig.server.data_dir)
    rig.server.restart()
    (ahead,) = rig.start_ranks(1, target=target)
    ahead.wait(PATIENCE_S)
    refusals = [line["error"] for line in rig.history().of("refused")]
    rig.join(rig.start_generator("new", groups=12))
    rig.join(rig.start_ranks(1, target=target, from_step=1, checkpoint_every=1, max_steps=4))

    assert ahead.status == 3
    assert "StoreBehindError" in refusals[-1]
    assert "the token names step 4" in refusals[-1]
    trained = {
        row["trajectory"].split("-")[0]
        for step in (2, 3, 4)
        for row in rig.history().rows(session=rig.history().sessions[-1].name, step=step)
    }
    assert trained == {"new"}
    assert rig.counts() == {"accepted": 32, "committed": 32}


def test_power_cut_under_everysec_is_reported_to_a_running_trainer(
    start_rig: StartRig, tmp_path: Path
) -> None:
    # Fault 7: the store plans the steps again that it lost, from what generators send again. The
    # trainer has trained other batches under the same numbers, and must not mix them.
    machine = Machine(tmp_path)
    rig = start_rig(binary=machine.binary)
    batcher = rig.start_batcher()
    rig.start_ranks(1, checkpoint_every=1, update_s=0.2)
    rig.join(rig.start_generator("kept", groups=4))
    rig.wait_for_lines("committed", 1)
    _wait_for_sync(rig, machine)
    machine.freeze_disk()
    rig.loses_history = True
    rig.start_generator("again", groups=20, pause_s=0.1, to_disk=1, keep_s=600)
    rig.wait_for_lines("stepped", 3)

    rig.server.kill()
    machine.lose_power(rig.server.data_dir)
    rig.server.restart()
    rig.ranks[0].wait(PATIENCE_S)
    (error,) = [line["error"] for line in rig.history().of("refused") if "group" not in line.facts]
    rig.start_ranks(1, from_step=1, checkpoint_every=1, max_steps=4)
    rig.join(rig.ranks)

    assert rig.ranks[0].status == 0
    assert batcher.status is None
    assert error.startswith(("StoreBehindError", "ConflictError")), error
    assert "step " in error
