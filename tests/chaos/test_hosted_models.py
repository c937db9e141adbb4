"""Services of hosted models killed in a run of the real tinker SDK: nothing is lost or repeated."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from testkit.hosted_processes import HostedProcesses
from testkit.recipe_runs import RUN_S, RecipeClient, Result, difference
from turnstream_server.embedded import EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(900)]

NUM_ROUNDS: Final = 13

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


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[HostedProcesses]:
    with (
        EmbeddedServer() as store,
        HostedProcesses(tmp_path, store_url=store.url, checkpoint_every=3) as processes,
    ):
        yield processes


def test_killed_gateway_and_engine_lose_nothing(processes: HostedProcesses) -> None:
    processes.start_all(**{service: places[0] for service, places in KILLS.items()})
    with RecipeClient(processes.hosting) as client:
        client.start("disturbed", num_rounds=NUM_ROUNDS)
        disturbed, deaths = _restart_until_end(processes, client)
        assert disturbed is not None
        assert "error" not in disturbed
        assert deaths == {service: len(places) for service, places in KILLS.items()}
        undisturbed = client.run("undisturbed", num_rounds=NUM_ROUNDS)

    assert "error" not in undisturbed
    assert len(undisturbed["received"]) > 2 * NUM_ROUNDS
    assert difference(processes.hosting, disturbed, undisturbed) == ""


def _restart_until_end(
    processes: HostedProcesses, client: RecipeClient
) -> tuple[Result | None, dict[str, int]]:
    """Restart dead services until the run ends; return its last line, and the deaths by service.

    After the last place a service is not killed any more.
    """
    deaths = dict.fromkeys(KILLS, 0)
    deadline_s = time.monotonic() + RUN_S
    result = None
    while result is None and time.monotonic() < deadline_s:
        result = client.wait(0.05)
        for service in KILLS:
            status = processes.status(service)
            if status is not None:
                assert status == -signal.SIGKILL, f"{service} ended with status {status}"
                deaths[service] += 1
                places = [*KILLS[service], ""]
                processes.start(service, failpoint=places[deaths[service]])
    return result, deaths
