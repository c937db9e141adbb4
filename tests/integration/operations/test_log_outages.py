"""The command log of a model in a store that restarts, loses its last writes, or is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from testkit.runs.command_logs import DONE, CommandLogs, run_all
from turnstream.errors import (
    FencedError,
    StoreFullError,
)
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.operations.log import (
    Lost,
    Run,
)


def test_commands_and_results_survive_a_restart_of_the_store(
    own_logs: CommandLogs, own_server: EmbeddedServer
) -> None:
    model_id = own_logs.new_model()
    log = own_logs.acquire(model_id)
    run_all(log)
    for number in (1, 2):
        own_logs.submit(model_id, number, "forward_backward")
    cut = log.take()

    own_server.kill()
    own_server.restart()
    own_logs.submit(model_id, 3, "forward_backward")

    assert log.take() == cut == Run(1, 2, "forward_backward")
    assert own_logs.acquire(model_id).take() == cut
    assert own_logs.results(model_id) == {0: DONE}


@pytest.mark.parametrize("lost", ["results", "command", "model"])
def test_worker_whose_writes_the_store_has_lost_must_stop(
    own_logs: CommandLogs,
    own_server: EmbeddedServer,
    past_of: Callable[[EmbeddedServer], Any],
    lost: str,
) -> None:
    # A power cut loses the last second. The worker has the lost commands in memory: it would run
    # them twice, or the next worker would skip them.
    logs, pasts = own_logs, {"model": past_of(own_server)}
    model_id = logs.new_model()
    log = logs.acquire(model_id)
    run_all(log)
    pasts["command"] = past_of(own_server)
    for number in (1, 2):
        logs.submit(model_id, number)
    pasts["results"] = past_of(own_server)
    log.take()
    if lost == "results":
        log.finish({1: DONE})
        log.take()

    pasts[lost].come_back()

    with pytest.raises(FencedError):
        log.finish({2 if lost == "results" else 1: DONE})
    if lost == "results":
        for write in (log.take, lambda: log.cover(1, checkpoint="c")):
            with pytest.raises(FencedError, match="has lost results of model"):
                write()
        again = logs.acquire(model_id)
        assert [entry.run.first for entry in again.history()] == [0]
        assert [run.first for run in run_all(again)] == [1, 2]


def test_workers_share_no_epoch_after_a_power_cut(
    own_logs: CommandLogs,
    own_server: EmbeddedServer,
    past_of: Callable[[EmbeddedServer], Any],
) -> None:
    model_id = own_logs.new_model()
    past = past_of(own_server)
    lost = own_logs.acquire(model_id, "w0")

    past.come_back()
    log = own_logs.acquire(model_id, "w1")

    with pytest.raises(FencedError, match="another worker runs model"):
        lost.take()
    assert log.take() == Run(0, 0, "create")


@pytest.mark.both_servers
def test_full_store_lets_workers_finish_and_cover(
    own_logs: CommandLogs, own_server: EmbeddedServer
) -> None:
    logs = own_logs
    model_id = logs.new_model()
    log = logs.acquire(model_id)
    run_all(log)
    for number in (1, 2, 4):
        logs.submit(model_id, number, "forward_backward", b"c" * 1000)
    logs.client.config_set("maxmemory", 1)

    with pytest.raises(StoreFullError):
        logs.submit(model_id, 3)
    log.renew(lease_s=60.0)
    log = logs.acquire(model_id)
    assert [(run.first, run.last) for run in run_all(log)] == [(1, 2)]
    assert log.take(gap_s=0.0) == Lost(3, (3, 4))
    log.cover(4, checkpoint="c")

    assert logs.numbers_with_bodies(model_id) == set()
    logs.client.config_set("maxmemory", 0)
    logs.submit(model_id, 5)
