"""One sample: its agent, its reward, and its seal."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Final, NamedTuple

from turnstream.types import TrajectoryKey
from turnstream_server.keys.sessions import LONGEST_S
from turnstream_server.rollout.files import RolloutFolder, SampleFiles, tail
from turnstream_server.rollout.gateway_calls import Caller, RunCalls, TakenTask
from turnstream_server.rollout.options import RolloutOptions
from turnstream_server.rollout.outcomes import (
    REWARD_COMMAND,
    End,
    RewardError,
    agent_environment,
    failed,
    failure_of,
    reward_environment,
    reward_of,
    status_of,
)
from turnstream_server.rollout.processes import Ended, run_process

REWARD_TIMEOUT_S: Final = 60.0
_MARGIN_S: Final = 600
"""Time of a session after the time limit of its agent."""


class OpenSample(NamedTuple):
    """A sample whose lease the gateway keeps. Its session key may seal, and no agent gets it."""

    task: TakenTask
    key: TrajectoryKey
    session: str


class SampleRunner:
    """Runs the samples of one rollout. `say` prints a line."""

    def __init__(
        self,
        options: RolloutOptions,
        folder: RolloutFolder,
        calls: RunCalls,
        call: Caller,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._folder = folder
        self._calls = calls
        self._call = call
        self._say = say
        self._has_shown_error = False

    async def open(self, task: TakenTask, key: TrajectoryKey) -> OpenSample:
        """Keep the lease of a sample until its agent has had its turn and its time."""
        rounds = 1 + math.ceil(task.num_samples / self._options.num_parallel)
        expires_in_s = min(LONGEST_S, rounds * self._session_s)
        made = await self._call(self._calls.new_session, task, key, expires_in_s=expires_in_s)
        await self._call(self._calls.facts, made["key"])
        return OpenSample(task, key, made["key"])

    async def run(self, sample: OpenSample) -> End:
        """Run the agent and the reward command; return the end of the sample."""
        files = self._folder.files_of(sample.key)
        environment = await self._environment(sample, files)
        ended = await run_process(
            self._options.command,
            environment=environment,
            output=files.output,
            timeout_s=self._options.timeout_s,
        )
        num_calls, last_incomplete = await self._call(self._calls.facts, sample.session)
        if (failure := failure_of(ended, num_calls=num_calls)) is not None:
            detail = "" if num_calls or not last_incomplete else f": {last_incomplete}"
            return failed(failure.reason + detail)
        if not self._options.reward:
            return End(status_of(ended))
        try:
            return End(status_of(ended), await self._reward(environment, ended, files))
        except RewardError as error:
            self._show(f"{sample.key.readable_name}: {REWARD_COMMAND}: {error}", files)
            return failed(f"{REWARD_COMMAND}: {error}")

    async def seal(self, sample: OpenSample, end: End) -> None:
        """Seal a sample."""
        await self._call(self._calls.seal, sample.session, end.fields())

    @property
    def _session_s(self) -> int:
        return math.ceil(self._options.timeout_s) + _MARGIN_S

    async def _environment(self, sample: OpenSample, files: SampleFiles) -> dict[str, str]:
        made = await self._call(
            self._calls.new_session,
            sample.task,
            sample.key,
            expires_in_s=self._session_s,
            may_seal=False,
            policy=self._options.policy,
        )
        return agent_environment(
            os.environ,
            made["environment"],
            run=self._options.run,
            group=sample.key.group_id,
            sample=sample.key.sample,
            task_file=files.task,
        )

    async def _reward(self, environment: dict[str, str], ended: Ended, files: SampleFiles) -> float:
        graded = await run_process(
            ("sh", "-c", self._options.reward),
            environment=reward_environment(environment, ended, output=files.output),
            output=files.reward,
            errors=files.reward.with_suffix(".reward-errors"),
            timeout_s=REWARD_TIMEOUT_S,
        )
        return reward_of(graded, tail(files.reward))

    def _show(self, text: str, files: SampleFiles) -> None:
        """Print the first failure of a reward command with its output."""
        if not self._has_shown_error:
            self._has_shown_error = True
            errors = tail(files.reward.with_suffix(".reward-errors"))
            self._say("\n".join([text, *(tail(files.reward) + errors).splitlines()[-20:]]))
