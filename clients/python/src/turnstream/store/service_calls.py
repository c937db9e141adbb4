"""The calls of a service and its runs, over a connection to the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import redis

from turnstream.batching.config import BatchingConfig
from turnstream.store.client.connection import connect_for_calls, limited_client
from turnstream.store.client.deadlines import SOCKET_TIMEOUT_S
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run
from turnstream.store.run import runs
from turnstream.store.run.batchers import registered_batchers
from turnstream.store.run.configs import read_config, revise_config
from turnstream.store.run.credits import Credit, credit
from turnstream.store.run.rewards import RewardOutcome, post_reward
from turnstream.store.run.tasks import Prompt, add_prompts
from turnstream.store.waits.version_wait import wait_for_version
from turnstream.types import Leftover, TrajectoryKey, VersionAnnounced
from turnstream.types.names import RunId


class StoreCalls:
    """The calls to the store at `url`; the first one connects."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: redis.Redis = connect_for_calls(url)

    def ping(self) -> None:
        """Check that the store answers."""
        with translating():
            self._client.ping()

    def close(self) -> None:
        """Disconnect; a later call connects again."""
        self._client.close()

    def create_run(self, name: str, config: BatchingConfig) -> RunId:
        """Create a run, or find the run with this config; return its id."""
        runs.create_run(self._client, name, config)
        return self.find_run(name)

    def find_run(self, name: str) -> RunId:
        """Return the id of the run that has this name now."""
        run = find_run(self._client, name)
        read_config(self._client, run)
        return run

    def list_runs(self) -> list[RunId]:
        """Return the ids of all runs, sorted."""
        return runs.list_runs(self._client)

    def config(self, run: RunId) -> BatchingConfig:
        """Return the settings in force."""
        return read_config(self._client, run)[1]

    def revise(self, run: RunId, config: BatchingConfig, *, from_step: int) -> int:
        """Change the settings from a step on; return the number of the revision."""
        return revise_config(self._client, run, config, from_step=from_step)

    def credit(self, run: RunId) -> Credit:
        """Return how many groups may start now."""
        return credit(self._client, run)

    def pause(self, run: RunId, reason: str) -> bool:
        """Pause a run; return whether that is new."""
        return runs.pause_run(self._client, run, reason)

    def resume(self, run: RunId) -> bool:
        """End the pause of a run; return whether there was one."""
        return runs.resume_run(self._client, run)

    def close_run(self, run: RunId, reason: str, *, leftover: Leftover) -> bool:
        """Close a run to new groups; return whether that is new."""
        return runs.close_run(self._client, run, reason, leftover=leftover)

    def reopen(self, run: RunId) -> bool:
        """Reopen a run; return whether it was closed."""
        return runs.reopen_run(self._client, run)

    def add_prompts(self, run: RunId, prompts: Sequence[Prompt], *, first: int | None) -> int:
        """Add prompts; return the number of prompts ever added."""
        # A slow link needs longer for payloads of some MB than for an answer.
        with limited_client(self._client, timeout_s=SOCKET_TIMEOUT_S) as client:
            return add_prompts(client, run, prompts, first=first)

    def post_reward(
        self,
        run: RunId,
        key: TrajectoryKey,
        reward: float | None,
        *,
        reward_components: Mapping[str, float] | None,
    ) -> RewardOutcome:
        """Post the reward of a trajectory."""
        return post_reward(self._client, run, key, reward, reward_components=reward_components)

    def newest_version(self, run: RunId) -> VersionAnnounced | None:
        """Return the highest announced version; None before the first."""
        return runs.newest_version(self._client, run)

    def wait_for_version(self, run: RunId, *, above: int, timeout_s: float) -> VersionAnnounced:
        """Return the newest version, once it is higher than `above`."""
        return wait_for_version(self._client, run, above=above, timeout_s=timeout_s)

    def batchers(self) -> Callable[[], list[str]]:
        """Return a function that reads the addresses of all batchers."""
        return registered_batchers(self._url)
