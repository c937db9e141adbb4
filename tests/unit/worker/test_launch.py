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


def session_of(environment: dict[str, str], **changes: str) -> str:
    return find_launch(environment={**environment, **changes}).session


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ((), {}, (0, 1, "")),
        ((0, 1), TWO_NODES, (0, 1, "")),
        ((3, 8, "start-2"), ONE_NODE, (3, 8, "start-2")),
        ((None, None, "own"), ONE_NODE, (1, 2, "own")),
    ],
)
def test_arguments_replace_the_environment_of_torchrun(
    arguments: Any, environment: Any, expected: Any
) -> None:
    assert find_launch(*arguments, environment=environment) == expected


def test_ranks_of_one_start_on_one_node_share_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    first = session_of(ONE_NODE)

    assert first.startswith("torchrun-")
    assert session_of(ONE_NODE, RANK="0") == first
    assert session_of(ONE_NODE, TORCHELASTIC_RESTART_COUNT="1") != first
    monkeypatch.setattr("os.getppid", lambda: 1)  # another launcher
    assert session_of(ONE_NODE) != first


def test_session_of_several_nodes_comes_from_the_run_id() -> None:
    first = session_of(TWO_NODES)

    assert session_of(TWO_NODES, RANK="3") == first
    assert session_of(TWO_NODES, TORCHELASTIC_RUN_ID="job-8") != first


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
