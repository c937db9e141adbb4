"""A training loop over steps: every rank calls `done` and `commit`, and the batcher counts."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import turnstream
from testkit import group, trajectory, turn, wait_until
from testkit.services.processes import in_fork
from turnstream.errors import BatcherUnavailableError, RejectedError, RunNotFoundError
from turnstream.store.client.connection import connect
from turnstream.store.client.scripts import run_command
from turnstream.store.run.batchers import list_batchers, register_command
from turnstream.types import RecoveryToken
from turnstream_server.ledger.admin.deletion import delete_run
from turnstream_server.ledger.core.frontier import read_frontier

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


@pytest.fixture
def service(server: Any) -> Any:
    with turnstream.connect(server.url) as service:
        yield service


@pytest.fixture
def run(service: Any, start_batcher: Callable[[], Any]) -> turnstream.Run:
    start_batcher()
    return service.create_run("steps", batch_groups=2, mini_batch_groups=1, max_staleness=20)


def publish(run: turnstream.Run, num_steps: int, *, first: int = 0) -> None:
    with run.publisher() as publisher:
        for number in range(2 * first, 2 * (first + num_steps)):
            publisher.publish(group(f"g{number}", trajectory(turn("ab", "CD", version=7))))


def frontier(run: turnstream.Run, server: Any) -> Any:
    with connect(server.url) as client:
        return read_frontier(client, run.name)


def trained(step: Any) -> set[str]:
    """Take all mini-batches of a step; the names of the groups in them."""
    names = [name for each in step for name in each.rows.trajectory_id if name]
    return {str(name).partition("/")[0] for name in names}


def test_loop_trains_each_step_once_and_ends_with_the_run(run: Any, server: Any) -> None:
    publish(run, 3)
    run.close()
    states: list[str] = []
    groups: list[set[str]] = []

    with run.batches() as batches:
        for step in batches:
            groups.append(trained(step))
            states.append(step.done())
            assert step.done() == states[-1]
            step.commit()

    assert groups == [{"g0", "g1"}, {"g2", "g3"}, {"g4", "g5"}]
    assert [RecoveryToken.parse(state).step for state in states] == [1, 2, 3]
    assert (frontier(run, server).stepped, frontier(run, server).committed) == (3, 3)


def test_step_counts_once_all_ranks_are_done(run: Any, server: Any) -> None:
    publish(run, 1)
    ranks = [run.batches(dp_rank=rank, dp_world_size=3, session="s") for rank in range(3)]
    steps = [next(batches) for batches in ranks]
    for step in steps:
        trained(step)

    with ThreadPoolExecutor() as pool:
        first = [pool.submit(step.done) for step in steps[:2]]
        wait_until(lambda: reported(server, run) == {b"stepped:0", b"stepped:1"})
        assert frontier(run, server).stepped == 0
        assert not any(each.done() for each in first)
        states = {steps[2].done(), *(each.result(30) for each in first)}

    assert len(states) == 1
    assert frontier(run, server).stepped == 1
    for rank, step in enumerate(steps):
        step.commit()
        assert frontier(run, server).committed == (1 if rank == 2 else 0)
    for batches in ranks:
        batches.close()


def reported(server: Any, run: Any) -> set[bytes]:
    with connect(server.url) as client:
        found: Any = client.hkeys(f"ts:{{{run.name}}}:ranks")
    return {name for name in found if name.startswith(b"stepped:")}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_process_gets_an_error_from_every_call(run: Any) -> None:
    publish(run, 2)
    with run.batches() as batches:
        step = next(batches)
        trained(step)

        def check() -> None:
            for call in (
                step.done,
                lambda: next(batches._stream),
                lambda: batches.announce_version(1),
            ):
                with pytest.raises(RejectedError, match=r"forked.* call run\.batches\(\) there"):
                    call()
            batches.close()

        assert in_fork(check) == "ok"
        with pytest.raises(TypeError, match="a batch stream cannot be pickled"):
            pickle.dumps(batches)
        step.done()
        next(batches)


def test_deleted_run_begins_no_session_of_the_next_run_of_its_name(
    server: Any, service: Any, run: Any
) -> None:
    with connect(server.url) as client:
        delete_run(client, run.name)
    new = service.create_run(run.name, batch_groups=1)
    publish(new, 1)

    with new.batches() as batches:
        step = next(batches)
        trained(step)
        with pytest.raises(RunNotFoundError):
            run.batches()

        assert RecoveryToken.parse(step.done()).step == 1


def test_batcher_is_found_through_the_store_until_it_stops(
    server: Any, service: Any, start_batcher: Callable[[], Any]
) -> None:
    run = service.create_run("found", batch_groups=2)
    with pytest.raises(BatcherUnavailableError, match="no batcher is registered at the store"):
        run.batches(timeout_s=0.0)

    batcher = start_batcher()
    with connect(server.url) as client:
        assert list_batchers(client) == [batcher.target]
        run.batches().close()
        batcher.stop()
        assert list_batchers(client) == []


def test_batcher_whose_lease_has_ended_is_not_listed(server: Any) -> None:
    with connect(server.url) as client:
        run_command(client, register_command("10.0.0.1:7600", lease_s=0.001))
        wait_until(lambda: list_batchers(client) == [])
        run_command(client, register_command("10.0.0.2:7600"))

        assert list_batchers(client) == ["10.0.0.2:7600"]


def test_ranks_of_torchrun_resume_without_a_session_name(
    run: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(run, 3)
    run.close()
    states: list[str | None] = [None, None]
    ages: list[list[tuple[int, float | None]]] = [[], []]

    def train(batches: Any, rank: int, until: int) -> None:
        for step in batches:
            trained(step)
            assert rank == 0 or "staleness" not in step.metrics
            states[rank] = step.done()
            ages[rank].append((step.number, step.metrics.get("staleness")))
            if rank == 0:
                batches.announce_version(10 + step.number)
            step.commit()
            if step.number == until:
                return

    for start, until in enumerate((2, 99)):
        variables = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RESTART_COUNT": start}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
            ranks: list[Any] = []
            for rank in range(2):
                monkeypatch.setenv("RANK", str(rank))
                ranks.append(stack.enter_context(run.batches(states[rank])))
            list(pool.map(train, ranks, range(2), [until] * 2))

    assert (frontier(run, server).stepped, frontier(run, server).committed) == (3, 3)
    assert states[0] == states[1]
    assert ages == [[(1, None), (2, 4), (3, 5)]] * 2  # 11 and 12 - 7
