from __future__ import annotations

import pytest

from testkit.summaries import make_summary
from turnstream_server.launch.replay import IncompleteReplayError, check_complete


def test_replay_is_complete_when_every_trajectory_has_ended() -> None:
    check_complete(
        make_summary(ledger={"committed": 6, "incomplete": 1, "abandoned": 1}), num_trajectories=8
    )

    with pytest.raises(IncompleteReplayError, match="the file has 8 trajectories, the ledger 7"):
        check_complete(make_summary(ledger={"committed": 7}), num_trajectories=8)


@pytest.mark.parametrize("state", ["open", "sealed", "awaiting_reward", "planned", "stepped"])
def test_trajectory_that_has_not_ended_is_an_error(state: str) -> None:
    with pytest.raises(IncompleteReplayError, match=rf"trajectories that are {state} \(2\)"):
        check_complete(make_summary(ledger={"committed": 6, state: 2}), num_trajectories=8)
