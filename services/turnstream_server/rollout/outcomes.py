"""Rules of a sample: its environment, its reward, and its end. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from turnstream.errors import TurnstreamError
from turnstream.types import Status
from turnstream.types.names import quoted
from turnstream_server.rollout.processes import Ended

NUM_FIRST: Final = 8
"""A rollout stops if so many samples have ended at its start, and all have failed alike."""

REWARD_COMMAND: Final = "reward command"

_PREFIX: Final = "TURNSTREAM_"
_MAX_REASON: Final = 200


class RewardError(Exception):
    """The reward command has failed, or has printed no finite number."""


class RolloutFailedError(TurnstreamError):
    """The rollout has stopped, because all of its first samples failed alike."""


class End(NamedTuple):
    """The end of a trajectory.

    Attributes:
        reward: None if it is posted later.
        reason: why the sample failed; "" if it did not.
    """

    status: Status
    reward: float | None = None
    reason: str = ""

    def fields(self) -> dict[str, Any]:
        """Return the body of the seal.

        >>> End(Status.COMPLETED).fields()
        {'status': 'completed', 'awaits_reward': True}
        >>> End(Status.ERROR, 0.0, "exit status 3").fields()["tags"]
        {'reason': 'exit status 3'}
        """
        fields: dict[str, Any] = {"status": self.status.value}
        fields |= {"awaits_reward": True} if self.reward is None else {"reward": self.reward}
        return fields | ({"tags": {"reason": self.reason}} if self.reason else {})


def failure_of(ended: Ended, *, num_calls: int) -> End | None:
    """Return the end of a sample whose agent has failed; None for one that gets a reward.

    >>> failure_of(Ended(3), num_calls=1).reason
    'exit status 3'
    >>> failure_of(Ended(0), num_calls=0).reason
    'no model call'
    >>> failure_of(Ended(143, has_timed_out=True), num_calls=1)
    """
    if ended.status and not ended.has_timed_out:
        return failed(f"exit status {ended.status}")
    return None if num_calls else failed("no model call")


def failed(reason: str) -> End:
    """Return the end of a sample that has failed for this reason."""
    return End(Status.ERROR, 0.0, reason[:_MAX_REASON])


def status_of(ended: Ended) -> Status:
    """Return the status of a sample that gets a reward."""
    return Status.TRUNCATED if ended.has_timed_out else Status.COMPLETED


def reward_of(ended: Ended, output: str) -> float:
    """Return the number in the last line of the reward command; RewardError without one.

    >>> reward_of(Ended(0), "checked 3 answers" + chr(10) + "0.5")
    0.5
    """
    if ended.has_timed_out:
        raise RewardError("it has timed out")
    if ended.status:
        raise RewardError(f"exit status {ended.status}")
    last = (output.strip().splitlines() or [""])[-1].strip()
    try:
        reward = float(last)
    except ValueError:
        raise RewardError(f"its last line is {quoted(last)}, expected a number") from None
    if not math.isfinite(reward):
        raise RewardError(f"it has printed {last}, expected a finite number")
    return reward


def agent_environment(
    inherited: Mapping[str, str],
    session: Mapping[str, str],
    *,
    run: str,
    group: str,
    sample: int,
    task_file: Path,
) -> dict[str, str]:
    """Return the variables of an agent: the inherited ones except ours, and those of its session.

    Keys and addresses of Turnstream are for the rollout alone.
    """
    return {
        **{name: value for name, value in inherited.items() if not name.startswith(_PREFIX)},
        **session,
        "TURNSTREAM_RUN": run,
        "TURNSTREAM_GROUP": group,
        "TURNSTREAM_SAMPLE": str(sample),
        "TURNSTREAM_TASK_FILE": str(task_file),
    }


def reward_environment(agent: Mapping[str, str], ended: Ended, *, output: Path) -> dict[str, str]:
    """Return the variables of the reward command."""
    return {
        **agent,
        "TURNSTREAM_OUTPUT_FILE": str(output),
        "TURNSTREAM_EXIT_STATUS": str(ended.status),
        "TURNSTREAM_OUTCOME": "timed_out" if ended.has_timed_out else "exited",
    }


class FirstSamples:
    """Whether the first samples have all failed alike: a typing error must not use up a data set.

    >>> first = FirstSamples()
    >>> [first.all_failed("exit status 127") for _ in range(NUM_FIRST)][-2:]
    [False, True]
    """

    def __init__(self) -> None:
        self._kind = ""
        self._num = 0

    def all_failed(self, reason: str) -> bool:
        """Count a sample, "" for one without a failure; return whether the rollout has to stop."""
        kind = reason.partition(":")[0]
        if self._num < 0 or not kind or kind != (self._kind or kind):
            self._num = -1
            return False
        self._kind, self._num = kind, self._num + 1
        return self._num >= NUM_FIRST
