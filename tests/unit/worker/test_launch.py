"""Which rank a process is, from torchrun's environment."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream.errors import InvalidConfigError
from turnstream.worker.launch import find_launch

ONE_NODE = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
TWO_NODES = {**ONE_NODE, "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "job-7"}


def test_process_without_torchrun_is_a_single_rank() -> None:
    assert find_launch(environment={}) == (0, 1, "")


def test_rank_and_world_size_come_from_torchrun() -> None:
    launch = find_launch(environment=ONE_NODE)

    assert (launch.dp_rank, launch.dp_world_size) == (1, 2)
    assert launch.session.startswith("torchrun-")


def test_ranks_of_one_start_share_a_session() -> None:
    first = find_launch(environment={**ONE_NODE, "RANK": "0"}).session
    restart = find_launch(environment={**ONE_NODE, "TORCHELASTIC_RESTART_COUNT": "1"}).session

    assert find_launch(environment=ONE_NODE).session == first
    assert restart != first


def test_another_launcher_process_has_another_session(monkeypatch: pytest.MonkeyPatch) -> None:
    first = find_launch(environment=ONE_NODE).session
    monkeypatch.setattr("os.getppid", lambda: 1)

    assert find_launch(environment=ONE_NODE).session != first


def test_session_of_several_nodes_comes_from_the_run_id() -> None:
    first = find_launch(environment=TWO_NODES).session

    assert find_launch(environment={**TWO_NODES, "RANK": "3"}).session == first
    assert find_launch(environment={**TWO_NODES, "TORCHELASTIC_RUN_ID": "job-8"}).session != first


def test_arguments_replace_the_environment() -> None:
    assert find_launch(0, 1, environment=TWO_NODES) == (0, 1, "")
    assert find_launch(3, 8, "start-2", environment=ONE_NODE) == (3, 8, "start-2")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK: 'first' in the environment is no number"),
        ({**TWO_NODES, "TORCHELASTIC_RUN_ID": "none"}, "session: .*torchrun --rdzv-id"),
        ({"WORLD_SIZE": "2"}, "session: several ranks need a name in common"),
    ],
)
def test_find_launch_refuses_an_environment_without_a_name(environment: Any, words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        find_launch(environment=environment)
