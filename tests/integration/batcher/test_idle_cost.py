"""Real batcher processes with many idle runs: their cost, and work that comes while they park."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from testkit import group, wait_until_async
from turnstream.store.client import keys
from turnstream.store.run.runs import close_run

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

WINDOW_S = 4.0
OPTIONS = {"leader_lease_s": 2.0, "park_after_s": 0.3}


async def started(start_batcher_process: Any, failpoint: str = "") -> Any:
    """Return a batcher process that answers."""
    process = start_batcher_process(failpoint, **OPTIONS)
    assert await process.line()
    return process


def num_operations(cluster: Any) -> int:
    found: Any = cluster.client.info("stats")
    return found["total_commands_processed"]


def cpu_s(process: Any) -> float:
    return time.clock_gettime((~process.pid << 3) | 2)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the CPU clock of a process")
@pytest.mark.parametrize(
    ("num_replicas", "num_runs"), [pytest.param(1, 200, marks=pytest.mark.campaign), (2, 50)]
)
async def test_idle_and_closed_runs_cost_no_polling(
    cluster: Any, start_batcher_process: Any, num_replicas: int, num_runs: int
) -> None:
    runs = [cluster.create_run(batch_groups=1) for _ in range(2 * num_runs)]
    for run in runs[num_runs:]:
        close_run(cluster.client, run)
    processes = [await started(start_batcher_process) for _ in range(num_replicas)]
    open_runs = runs[:num_runs] if num_replicas > 1 else runs
    leaders = [keys.run_keys(run).leader for run in open_runs]
    await wait_until_async(
        lambda: all(cluster.client.hexists(leader, "parked") for leader in leaders),
        120,
        describe="parked runs",
    )
    await wait_until_async(lambda: is_quiet(cluster), 120, describe="a quiet store")

    commands, used_s = num_operations(cluster), [cpu_s(each) for each in processes]
    await asyncio.sleep(WINDOW_S)

    assert num_operations(cluster) - commands < 50 * num_replicas
    for process, before_s in zip(processes, used_s, strict=True):
        assert cpu_s(process) - before_s < WINDOW_S / 20


async def is_quiet(cluster: Any) -> bool:
    before = num_operations(cluster)
    await asyncio.sleep(1)
    return num_operations(cluster) - before < 20


@pytest.mark.parametrize("place", ["park.before", "park.after"])
async def test_work_that_arrives_while_a_run_is_parked_is_done(
    cluster: Any, start_batcher_process: Any, place: str
) -> None:
    run = cluster.create_run(batch_groups=1)
    process = await started(start_batcher_process, f"{place}=stop")
    stat = Path(f"/proc/{process.pid}/stat")
    await wait_until_async(
        lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", describe=place
    )

    await cluster.publish(run, group("g0"))
    process.send_signal(signal.SIGCONT)

    await cluster.planned(run, 1)
