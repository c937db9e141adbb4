"""Faults of the store: killed, cut off from power, damaged, full, empty, without disk, asleep."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.episodes import episode
from harness.machine import Machine
from harness.proxy import Proxy
from harness.rig import CONFIG, Rig, asleep, config, server_with
from turnstream.errors import StoreBehindError
from turnstream.generator import Publisher
from turnstream.store import keys
from turnstream.store.runs import create_run
from turnstream.testing import ids
from turnstream_server.embedded import find_binary

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(120)]

StartRig = Callable[..., Rig]


def kind_of_server(kind: str) -> Path:
    """The embedded server's program, or a redis-server where there is one."""
    if kind == "valkey":
        return find_binary()
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server is installed")
    return Path(found)


@pytest.mark.parametrize(
    ("kind", "fsync"),
    [("valkey", "always"), ("valkey", "everysec"), ("valkey", "no"), ("redis", "everysec")],
)
def test_a_server_that_is_killed_under_load_loses_nothing_it_acknowledged(
    start_rig: StartRig, tmp_path: Path, kind: str, fsync: str
) -> None:
    # Fault 6: three kills; every service goes on by itself.
    binary = server_with(tmp_path, kind_of_server(kind), arguments=["--appendfsync", fsync])
    rig = start_rig(binary=binary)
    assert rig.client.config_get("appendfsync") == {"appendfsync": fsync}
    batcher = rig.start_batcher().service
    generators = [rig.start_generator(f"w{n}", groups=16, pause_s=0.02) for n in range(2)]
    rig.start_ranks(1, checkpoint_every=1, timeout_s=30)

    for number in range(3):
        rig.wait_for_lines("sealed", 12 * (number + 1))
        rig.server.kill()
        rig.server.restart()
    rig.wait_for_lines("committed", 6)

    assert [service.status for service in (batcher, rig.ranks[0])] == [None, None]
    rig.join(generators)
    rig.ranks[0].kill()
    rig.drain()


def test_a_power_cut_under_fsync_loses_nothing_it_acknowledged(
    start_rig: StartRig, tmp_path: Path
) -> None:
    # Fault 7: the append-only file is cut to what had reached the disk.
    machine = Machine(tmp_path)
    rig = start_rig(binary=machine.binary, durability="fsync")
    rig.start_batcher()
    rig.start_generator(groups=24)
    rig.start_ranks(1, checkpoint_every=1, timeout_s=30)

    for number in range(3):
        rig.wait_for_lines("sealed", 8 * (number + 1))
        rig.server.kill()
        machine.lose_power(rig.server.data_dir)
        rig.server.restart()
    rig.wait_for_lines("committed", 3)

    rig.ranks[0].kill()
    rig.drain()


def test_a_power_cut_under_everysec_costs_generators_that_live_nothing(
    start_rig: StartRig, tmp_path: Path
) -> None:
    # Fault 7: what was acknowledged and never synced is sent again, by whoever wrote it.
    machine = Machine(tmp_path)
    rig = start_rig(binary=machine.binary)
    batcher = rig.start_batcher().service
    generators = [
        rig.start_generator(f"w{n}", groups=10, pause_s=0.2, to_disk=1, keep_s=3.0)
        for n in range(2)
    ]
    num_lost = 0

    for _ in range(2):
        machine.freeze_disk()
        rig.wait_for_lines("sealed", rig.count("sealed") + 8)
        rig.server.kill()
        num_lost += machine.lose_power(rig.server.data_dir)
        rig.server.restart()
    rig.join(generators)

    assert num_lost > 0
    assert batcher.status is None
    assert sum(line["restarts"] for line in rig.history().of("done")) > 0
    rig.drain()
    assert rig.counts() == {"accepted": 40, "committed": 40}


def test_a_power_cut_under_everysec_is_told_to_a_writer_whose_older_turns_are_gone(
    start_rig: StartRig, tmp_path: Path
) -> None:
    # Fault 7: a loss of more than is kept is never a hole in a trajectory, and has a name.
    machine = Machine(tmp_path)
    rig = start_rig(binary=machine.binary)
    with Publisher(rig.server.url, rig.run, writer="w", keep_s=0.5) as publisher:
        begun = publisher.trajectory("begun", 0, num_samples=1)
        begun.append(ids("ab"), ids("CD")).result(10)
        _wait_for_sync(rig, machine)
        machine.freeze_disk()
        begun.append(ids("abCD"), ids("E")).result(10)
        publisher.flush_to_disk(30)
        new = publisher.trajectory("new", 0, num_samples=1)
        new.append(ids("ab"), ids("CD")).result(10)
        rig.server.kill()
        assert machine.lose_power(rig.server.data_dir) > 0
        rig.server.restart()

        with pytest.raises(StoreBehindError, match=r"begun/0/0: .* without turn 1, which"):
            begun.append(ids("abCDE"), ids("F")).result(10)
        new.append(ids("abCD"), ids("F")).result(10)

    assert rig.counts() == {"accepted": 2, "open": 2}


def _wait_for_sync(rig: Rig, machine: Machine) -> None:
    """Until all that is in the append-only file is on disk."""
    rig.wait(lambda: machine.unsynced(rig.server.data_dir) == 0, "a sync")


@pytest.mark.parametrize("door", ["batcher", "follower"])
def test_a_power_cut_under_everysec_is_told_to_a_trainer_that_is_ahead_of_the_store(
    start_rig: StartRig, tmp_path: Path, door: str
) -> None:
    # Fault 7: its token is the authority, and the difference has a name. The batchers live on with
    # plans in memory that the store has lost, the one that leads and the one that follows.
    machine = Machine(tmp_path)
    rig = start_rig(binary=machine.binary)
    rig.start_batcher()
    rig.start_batcher("follower")
    target = rig.address(door)
    rig.join(rig.start_generator("kept", groups=4))
    rig.join(rig.start_ranks(1, target=target, checkpoint_every=1, max_steps=1))
    _wait_for_sync(rig, machine)
    machine.freeze_disk()
    rig.join(rig.start_generator("lost", groups=16))
    rig.join(rig.start_ranks(1, target=target, checkpoint_every=1, max_steps=4))

    rig.server.kill()
    machine.lose_power(rig.server.data_dir)
    rig.server.restart()
    (ahead,) = rig.start_ranks(1, target=target)
    ahead.wait(30)
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


def test_a_power_cut_under_everysec_is_told_to_a_trainer_that_lives_on(
    start_rig: StartRig, tmp_path: Path
) -> None:
    # Fault 7: the store plans the steps again that it lost, from what generators send again. The
    # trainer has trained other batches under the same numbers, and must not mix them.
    machine = Machine(tmp_path)
    rig = start_rig(binary=machine.binary)
    batcher = rig.start_batcher().service
    rig.start_ranks(1, checkpoint_every=1, update_s=0.2)
    rig.join(rig.start_generator("kept", groups=4))
    rig.wait_for_lines("committed", 1)
    _wait_for_sync(rig, machine)
    machine.freeze_disk()
    rig.start_generator("again", groups=20, pause_s=0.1, to_disk=1, keep_s=20)
    rig.wait_for_lines("stepped", 3)

    rig.server.kill()
    machine.lose_power(rig.server.data_dir)
    rig.server.restart()
    rig.ranks[0].wait(60)
    told = [line["error"] for line in rig.history().of("refused")][-1]
    rig.start_ranks(1, from_step=1, checkpoint_every=1, max_steps=4)
    rig.join(rig.ranks)

    assert rig.ranks[0].status == 0
    assert batcher.status is None
    assert told.startswith(("StoreBehindError", "ConflictError")), told
    assert "step " in told


def test_a_torn_end_of_the_file_is_dropped_and_sent_again(rig: Rig) -> None:
    # Fault 8: a crash in the middle of a write. The store had acknowledged it, and comes back
    # without; the writer does nothing but live.
    turns = keys.trajectory_keys(rig.run, "g/0/0").turns
    with Publisher(rig.server.url, rig.run, writer="w") as publisher:
        trajectory = publisher.trajectory("g", 0, num_samples=1)
        trajectory.append(ids("ab"), ids("CD")).result(10)
        with asleep(rig.server.pid):
            receipt = trajectory.append(ids("abCD"), ids("E"))
        receipt.result(10)
        before: Any = rig.client.xrange(turns)
        rig.server.kill()
        path = _append_only_file(rig)
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.rindex(b"XADD")])
        rig.server.restart()
        rig.wait(lambda: publisher.statistics().num_resent, "turns that are sent again")
        after: Any = rig.client.xrange(turns)
        trajectory.append(ids("abCDE"), ids("F")).result(10)

    assert len(before) == 2
    assert after == before
    assert b"Truncat" in (rig.server.data_dir / "server.log").read_bytes()


def _append_only_file(rig: Rig) -> Path:
    (path,) = rig.server.data_dir.glob("appendonlydir/*.incr.aof")
    return path


def test_payload_that_was_damaged_on_disk_is_set_aside_and_never_trained(rig: Rig) -> None:
    # Fault 8: 64 bytes of a turn are overwritten; the server starts and serves them as they are.
    rig.join(rig.start_generator(groups=12, samples=3))
    damaged = next(iter(rig.history().seals))
    tokens = episode(damaged, writer="w").turns[0].response_ids.tobytes()
    rig.server.kill()
    path = _append_only_file(rig)
    whole = path.read_bytes()
    assert whole.count(tokens) == 1
    start = whole.index(tokens)
    path.write_bytes(whole[:start] + bytes(len(tokens)) + whole[start + len(tokens) :])
    rig.server.restart()

    rig.excused = {damaged}
    rig.start_batcher()
    rig.drain()

    entry: Any = rig.client.hget(keys.run_keys(rig.run).ledger, damaged)
    assert entry.startswith(b"dead:")
    assert rig.counts()["committed"] == 12 * 3 - 1


def test_a_damaged_event_stops_neither_the_planner_nor_its_successor(rig: Rig) -> None:
    # Fault 8, in the run's own stream: the group of that event waits, every other one is trained.
    rig.join(rig.start_generator(groups=13))
    names = keys.run_keys(rig.run)
    entries: Any = rig.client.xrange(names.events)
    victim = next(iter(rig.history().seals))
    rig.client.delete(names.events)
    for entry_id, fields in entries:
        record = fields[b"r"]
        if entry_id == entries[1][0]:  # the first seal
            record = record[:-6] + bytes(2) + record[-4:]
        rig.client.xadd(names.events, {"r": record}, id=entry_id)
    rig.excused = rig.history().acknowledged_by_group[victim.split("/")[0]]

    first = rig.start_batcher().service
    rig.join(rig.start_ranks(1, max_steps=2, checkpoint_every=1))
    first.kill()
    second = rig.start_batcher().service
    rig.join(rig.start_ranks(1, max_steps=3, checkpoint_every=1))

    assert second.status is None
    assert "is poison" in second.log_path.read_text()
    rig.check()


def test_a_full_server_holds_producers_up_while_consumers_go_on(start_rig: StartRig) -> None:
    # Fault 9
    rig = start_rig(config=config(max_staleness=20))
    rig.start_batcher()
    rig.start_generator("before", groups=12)
    rig.wait_for_lines("done")
    memory: Any = rig.client.info("memory")
    rig.client.config_set("maxmemory", memory["used_memory"] + 100_000)
    rig.start_generator("held", groups=100)
    rig.wait(lambda: _is_refused(rig), "refused writes")

    rig.start_ranks(1, checkpoint_every=1)
    rig.wait_for_lines("committed", 3)

    assert not [line for line in rig.history().of("done") if line.process == "generator-held"]
    rig.client.config_set("maxmemory", 0)
    rig.ranks[0].kill()
    rig.drain(timeout_s=30)


def _is_refused(rig: Rig) -> bool:
    return any(
        line.facts["retries"] > 2 or line.facts["waits"] for line in rig.history().of("alive")
    )


def test_an_empty_server_is_noticed_and_nothing_begins_again_at_0(rig: Rig) -> None:
    # Fault 10: the data set is gone, the address is the same.
    batcher = rig.start_batcher().service
    rig.start_generator(groups=40, pause_s=0.05, timeout_s=5)
    rig.start_ranks(1, checkpoint_every=1, timeout_s=5)
    rig.wait_for_lines("committed", 2)
    rig.server.kill()
    shutil.rmtree(rig.server.data_dir / "appendonlydir")
    rig.server.restart()

    rig.ranks[0].wait(30)
    lost = [line["error"] for line in rig.history().of("refused")]
    rig.wait_for_lines("ended", 2)

    assert rig.ranks[0].status == 3
    assert any("RunNotFoundError" in error for error in lost), lost
    assert batcher.status is None
    create_run(rig.client, rig.run, CONFIG)  # as an operator would
    (ahead,) = rig.start_ranks(1)
    ahead.wait(30)
    assert ahead.status == 3
    assert any("StoreBehindError" in line["error"] for line in rig.history().of("refused"))
    assert rig.ledger().accepted == 0
    assert rig.planned() == 0
    rig.join(rig.start_generator("new", groups=4))
    rig.wait(lambda: rig.planned() == 1, "the first plan of the new store")
    assert batcher.status is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of four megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False, text=True)
    if mounted.returncode:
        pytest.skip(f"may not mount a small disk: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_refuses_writes_before_they_are_acknowledged(
    start_rig: StartRig, small_disk: Path
) -> None:
    # Fault 11
    rig = start_rig(data_dir=small_disk)
    rig.start_batcher()
    rig.start_generator("before", groups=4)
    rig.wait_for_lines("done")
    _fill(small_disk)
    held = rig.start_generator("held", groups=16)
    rig.wait(lambda: _is_refused(rig), "refused writes")
    sealed = rig.count("sealed")

    (small_disk / "filler").unlink()
    rig.join(held)

    assert sealed < 4 * 2 + 16 * 2
    rig.server.kill()  # what was acknowledged meanwhile is on the disk
    rig.server.restart()
    rig.drain()


def test_a_full_disk_under_fsync_ends_the_server_and_loses_nothing(
    start_rig: StartRig, small_disk: Path
) -> None:
    # Fault 11: a server that promises fsync ends when it cannot keep the promise.
    rig = start_rig(data_dir=small_disk, durability="fsync")
    rig.start_batcher()
    rig.start_generator(groups=16, pause_s=0.05)
    rig.wait_for_lines("sealed", 4)
    _fill(small_disk)
    rig.wait(lambda: not rig.server.is_running, "the end of the server")

    (small_disk / "filler").unlink()
    rig.server.restart()

    rig.drain(timeout_s=30)


def _fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass


def test_a_server_that_sleeps_for_less_than_a_lease_costs_nobody_a_lease(rig: Rig) -> None:
    # Fault 12
    services = [rig.start_batcher(name, lease_s=5.0).service for name in ("batcher", "other")]
    rig.start_generator(groups=24, pause_s=0.02)
    rig.start_ranks(1, checkpoint_every=1, timeout_s=30)
    rig.wait_for_lines("stepped")
    leader = keys.run_keys(rig.run).leader
    owner: Any = rig.client.hget(leader, "owner")

    with asleep(rig.server.pid):
        subprocess.run(["sleep", "2.5"], check=True)
    rig.wait_for_lines("stepped", rig.count("stepped") + 1)

    assert rig.client.hget(leader, "owner") == owner
    assert rig.client.hget(leader, "epoch") == b"1"
    assert [service.status for service in services] == [None, None]
    rig.ranks[0].kill()
    rig.drain()


def test_a_slow_path_to_the_server_costs_time_and_nothing_else(rig: Rig) -> None:
    # Fault 12
    with Proxy(rig.server.url) as proxy:
        rig.store_url = proxy.url
        proxy.replies.delay_s = 0.05
        rig.start_batcher()
        rig.start_generator(groups=8)
        rig.drain()

    leader: Any = rig.client.hget(keys.run_keys(rig.run).leader, "epoch")
    assert leader == b"1"
