"""`turnstream.connect`: the store, its runs, and their publishers."""

from __future__ import annotations

from typing import Any

import pytest

import turnstream
from testkit import ids
from turnstream.errors import (
    ConflictError,
    InvalidConfigError,
    RunNotFoundError,
    StoreUnavailableError,
)
from turnstream.store.client import keys
from turnstream.types import TrajectoryState
from turnstream_server.embedded import free_port
from turnstream_server.ledger.admin.deletion import delete_run
from turnstream_server.ledger.queries.ledger import read_ledger

pytestmark = pytest.mark.redis


@pytest.fixture
def service(server: Any) -> Any:
    with turnstream.connect(server.url) as service:
        yield service


def write_group(run: turnstream.Run, group_id: str) -> None:
    with run.publisher() as publisher, publisher.group(group_id, num_samples=2) as group:
        for sample, trajectory in enumerate(group):
            trajectory.append(ids("ab"), ids("CD"), logprobs=[-0.5, -0.25], policy_version=0)
            trajectory.seal(reward=float(sample))


def test_group_is_written_through_one_import(service: Any, client: Any, new_name: str) -> None:
    run = service.create_run(new_name, batch_groups=1)

    write_group(run, "task-7")

    assert read_ledger(client, new_name).by_state[TrajectoryState.SEALED] == 2
    assert service.run(new_name).name == new_name
    assert new_name in service.runs()


def test_update_takes_all_groups_of_a_step_by_default(service: Any, new_name: str) -> None:
    run = service.create_run(new_name, batch_groups=8, estimator="grpo")

    assert (run.config.batch_groups, run.config.mini_batch_groups) == (8, 8)
    assert run.config.estimator == "grpo"


def test_unknown_setting_is_refused_with_the_nearest_name(service: Any, new_name: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"batch_group: .*did you mean batch_groups"):
        service.create_run(new_name, batch_group=8)
    with pytest.raises(InvalidConfigError, match="batch_groups: it is missing"):
        service.create_run(new_name, estimator="grpo")

    assert new_name not in service.runs()
    run = service.create_run(new_name, batch_groups=1)
    with pytest.raises(InvalidConfigError, match=r"max_stalenes: .*did you mean max_staleness"):
        run.revise(from_step=3, max_stalenes=2)


def test_run_with_other_settings_is_not_opened(service: Any, new_name: str) -> None:
    service.create_run(new_name, batch_groups=1)

    assert service.create_run(new_name, batch_groups=1).name == new_name
    with pytest.raises(ConflictError):
        service.create_run(new_name, batch_groups=2)


def test_missing_run_is_named(service: Any, new_name: str) -> None:
    with pytest.raises(RunNotFoundError, match=new_name):
        service.run(new_name)


def test_run_stays_the_same_run_after_its_name_is_used_again(
    service: Any, client: Any, new_name: str
) -> None:
    old = service.create_run(new_name, batch_groups=1)
    delete_run(client, new_name)
    new = service.create_run(new_name, batch_groups=2)

    with pytest.raises(RunNotFoundError):
        write_group(old, "late")
    with pytest.raises(RunNotFoundError):
        _ = old.config
    assert new.config.batch_groups == 2
    assert client.hlen(keys.run_keys(f"{new_name}~2").groups) == 0


def test_operator_pauses_revises_closes_and_reopens(service: Any, new_name: str) -> None:
    run = service.create_run(new_name, batch_groups=2)

    assert (run.pause("judge is down"), run.pause(), run.resume()) == (True, False, True)
    assert run.revise(from_step=3, batch_groups=4, mini_batch_groups=4) == 2
    run.close()
    assert run.reopen()
    assert run.credit().num_groups > 0


def test_address_without_a_store_is_refused_with_the_command_to_start_one() -> None:
    port = free_port()

    with pytest.raises(StoreUnavailableError, match=f"127.0.0.1:{port}.*turnstream up"):
        turnstream.connect(f"redis://127.0.0.1:{port}")


def test_address_comes_from_the_environment(
    server: Any, new_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", server.url)

    with turnstream.connect() as service:
        service.create_run(new_name, batch_groups=1)
        assert new_name in service.runs()


def test_unknown_public_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'conect'"):
        _ = turnstream.conect  # type: ignore[attr-defined]
    assert sorted(turnstream.__all__) == turnstream.__all__
    assert all(hasattr(turnstream, name) for name in turnstream.__all__)
