"""A store that is full, has no disk left, stands still for a while, or is slow."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from harness.proxy import Proxy
from harness.rig import CONFIG, ENDLESS, Rig, config
from harness.stored import lost_with
from testkit.services.processes import frozen
from turnstream.batching.config import BatchingConfig
from turnstream.errors import WaitKind
from turnstream.store.waits.wait_reasons import reasons
from turnstream_server.batcher.serving.health import TROUBLE
from turnstream_server.ledger.queries.run_snapshot import read_snapshot
from turnstream_server.settings import Settings

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(600)]

StartRig = Callable[..., Rig]


WAITING = "full-0/0/0"
"""It has three turns; the first is stored when the server becomes full."""

NUM_PLANNED = CONFIG.max_planned_ahead + 1

PAUSE_S = 5.5
"""More than the default lease of a planner, and less than that of a generator."""

LEASE_S: float = BatchingConfig(batch_groups=1, mini_batch_groups=1).lease_s
PLANNER_LEASE_S: float = Settings.model_fields["lease_s"].default


@pytest.fixture
def full(start_rig: StartRig) -> Rig:
    """A server with payload for eight steps and no memory for more, in front of two producers."""
    rig = start_rig(config=config(max_staleness=20, retain_checkpoints=1))
    rig.start_batcher()
    rig.join(rig.start_generator("before", groups=32, samples=8))
    rig.wait(lambda: rig.planned() == NUM_PLANNED, "all plans")  # no payload is read any more
    may_go_on = rig.folder / "go on"
    rig.start_generator("full", groups=3, hang_in=WAITING, hang_until=may_go_on)
    rig.wait_for_lines("hanging")
    rig.client.config_set("maxmemory", _memory(rig)["used_memory"] - 50_000)
    rig.start_generator("late", groups=4)
    may_go_on.touch()
    return rig


def test_full_server_delays_producers_while_consumers_continue(full: Rig) -> None:
    """Takes more than 5 s: a store is filled and freed, step by step."""
    # Fault 9: the server gets no more memory. Released steps free some.
    limit = _memory(full)["maxmemory"]
    used: list[int] = []

    def measure() -> None:
        used.append(_memory(full)["used_memory"])

    began_s = time.monotonic()
    full.wait(lambda: "full" in _reason_of_wait(full), "a producer with the reason")
    full.wait(lambda: full.count("opening") == 34, "a producer that requests admission")
    full.join(full.start_ranks(1, checkpoint_every=1, max_steps=1))
    refused, lasted_s = _num_refused(full), time.monotonic() - began_s
    full.wait(lambda: _num_refused(full) > refused + 1, "both producers, which try again")
    measure()
    while_full = full.history()
    full.start_ranks(1, checkpoint_every=1)
    full.wait(lambda: measure() or full.count("done") == 4, "the end of both producers")
    full.drain()

    assert {line["group"] for line in while_full.of("opened")}.isdisjoint({"late-0"})
    assert [line["trajectory"] for line in while_full.of("appended")][-1] == WAITING
    assert refused < 30 + 10 * lasted_s  # they wait between two tries
    assert used[0] > limit
    assert max(used) < 1.1 * limit  # I8: the consumers need little
    assert full.counts() == {"accepted": 270, "committed": 270}


def _reason_of_wait(rig: Rig) -> str:
    lines = rig.history().of("wait_reasons")
    found = [line["reasons"] for line in lines if line["trajectory"] == WAITING]
    return dict(found[-1]).get(WaitKind.STORE_FULL, "") if found else ""


def _num_refused(rig: Rig, error: str = "OOM") -> int:
    errors: Any = rig.client.info("errorstats")
    return errors.get(f"errorstat_{error}", {"count": 0})["count"]


def _memory(rig: Rig) -> dict[str, int]:
    memory: Any = rig.client.info("memory")
    return memory


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False, text=True)
    if mounted.returncode:
        pytest.skip(f"may not mount a small disk: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_refuses_writes_before_they_are_acknowledged(
    start_rig: StartRig, small_disk: Path
) -> None:
    # Fault 11: health is red for as long as writes are refused, and says why.
    rig = start_rig(data_dir=small_disk)
    rig.start_batcher()
    rig.start_generator("before", groups=4)
    rig.wait_for_lines("done")
    _wait_for_health(rig, HealthCheckResponse.SERVING)
    _fill(small_disk)
    waiting = rig.start_generator("waiting", groups=16)
    rig.wait(lambda: _num_refused(rig, "MISCONF") > 2, "refused writes")
    rig.wait_for_lines("opening", 4 + 1)  # by the producer that has to wait
    counts = rig.counts()
    refuses = "the store refuses writes: its last write to the disk failed"
    _wait_for_health(rig, HealthCheckResponse.NOT_SERVING, refuses)
    first = reasons(read_snapshot(rig.client, rig.run))[0]
    assert rig.counts() == counts

    (small_disk / "filler").unlink()
    rig.join(waiting)
    _wait_for_health(rig, HealthCheckResponse.SERVING)

    assert (first.kind, first.facts) == (WaitKind.STORE_AWAY, {"reason": refuses})
    rig.server.kill()  # acknowledged data are on the disk
    assert lost_with(small_disk, rig.history(), run=rig.run, binary=None) == []
    assert rig.count("sealed") == 4 * 2 + 16 * 2 > counts["accepted"]
    rig.server.restart()
    rig.drain()


def test_full_disk_under_fsync_ends_the_server_and_loses_nothing(
    start_rig: StartRig, small_disk: Path
) -> None:
    # Fault 11: a server that promises fsync ends when it cannot keep the promise.
    rig = start_rig(data_dir=small_disk, durability="fsync")
    rig.start_batcher()
    rig.start_generator(groups=16, pause_s=0.05)
    rig.wait_for_lines("sealed", 4)
    _fill(small_disk)
    rig.wait(lambda: not rig.server.is_running, "the end of the server")
    _wait_for_health(rig, HealthCheckResponse.NOT_SERVING, "the store cannot be reached")

    assert lost_with(small_disk, rig.history(), run=rig.run, binary=None) == []
    (small_disk / "filler").unlink()
    rig.server.restart()
    _wait_for_health(rig, HealthCheckResponse.SERVING)

    rig.drain()


def _wait_for_health(rig: Rig, state: int, trouble: str = "") -> None:
    def is_reported() -> bool:
        with grpc.insecure_channel(rig.address()) as channel:
            stub: Any = HealthStub(channel)
            reply, call = stub.Check.with_call(HealthCheckRequest(), timeout=10.0)
            trailing: dict[str, Any] = dict(call.trailing_metadata() or ())
            return reply.status == state and trailing.get(TROUBLE, "").startswith(trouble)

    name = HealthCheckResponse.ServingStatus.Name(state)
    rig.wait(is_reported, f"a batcher whose health is {name}")


def _fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass


@contextlib.contextmanager
def _stopped(rig: Rig, proxy: Proxy) -> Iterator[None]:
    with frozen(rig.server.pid):
        yield


@contextlib.contextmanager
def _unanswered(rig: Rig, proxy: Proxy) -> Iterator[None]:
    """The server does all that it is asked, leases run on, and answers are late from now on."""
    proxy.replies.held_until_s = time.monotonic() + PAUSE_S
    proxy.replies.delay_s = 0.02
    yield


@pytest.mark.parametrize("standing_still", [_stopped, _unanswered])
def test_store_that_stops_for_five_seconds_costs_only_time(
    start_rig: StartRig, standing_still: Callable[[Rig, Proxy], AbstractContextManager[None]]
) -> None:
    # Fault 12: two replicas with default leases. The lease of the planner may end, and the other
    # replica may lead then; each step still has one plan.
    assert PLANNER_LEASE_S < PAUSE_S < LEASE_S
    rig = start_rig(config=config(lease_s=LEASE_S))
    with Proxy(rig.server.url) as proxy:
        rig.store_url = proxy.url
        rig.start_generator(groups=ENDLESS, pause_s=0.05)
        other = rig.start_batcher("other", lease_s=PLANNER_LEASE_S, waits=False)
        replicas = [rig.start_batcher(lease_s=PLANNER_LEASE_S), other]
        rig.start_ranks(1, checkpoint_every=1)
        rig.wait_for_lines("committed", 2)

        with standing_still(rig, proxy):
            subprocess.run(["sleep", str(PAUSE_S)], check=True)
        before = rig.count("committed")
        rig.wait_for_lines("committed", before + 2)

        assert [replica.status for replica in replicas] == [None, None]
        rig.store_url = rig.server.url
        rig.close_run()
        rig.drain()

    assert _longest_silence_s(rig) > 5.0
    assert set(rig.counts()) == {"accepted", "committed"}  # no generator lost a lease


def _longest_silence_s(rig: Rig) -> float:
    done = rig.history().of("appended", "sealed", "stepped", "committed")
    return max(later.at - earlier.at for earlier, later in itertools.pairwise(done))
