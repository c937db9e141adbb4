"""Shared state of the processes of one run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulator.checks.history import History
from turnstream.batching.config import BatchingConfig
from turnstream.errors import UnavailableError
from turnstream.store.client import keys
from turnstream_server.batcher.planner.snapshotting import Upkeep

if TYPE_CHECKING:
    from simulator.generators import Generator
    from simulator.world import World

URL = "redis://simulated"


@dataclass
class SharedState:
    """Shared state of the processes of one run: its settings and its record.

    Attributes:
        config: first config of the run; `in_force` is the current one.
        another_config: draws a config for a revision.
        is_closing: no new group is started; open groups are completed.
        rotten: trajectories whose payload was damaged.
    """

    run: str
    config: BatchingConfig
    upkeep: Upkeep
    leader_lease_s: float
    park_after_s: float
    max_groups: int
    another_config: Callable[[BatchingConfig], BatchingConfig]
    history: History = field(default_factory=History)
    is_closing: bool = False
    is_ended: bool = False
    is_closed_for_good: bool = False
    num_groups: int = 0
    num_evals: int = 0
    max_evals: int = 0
    num_prompts: int = 0
    most_episodes: int = 1
    rotten: set[str] = field(default_factory=set)
    generators: list[Generator] = field(default_factory=list)
    token_ids: int = 0

    def __post_init__(self) -> None:
        self.in_force = self.config
        self.ever_in_force = [self.config]

    def goes_by(self, config: BatchingConfig) -> None:
        """A config is in force from now on."""
        self.in_force = config
        self.ever_in_force.append(config)
        self.history.may_release(retained=config.retain_checkpoints)

    def frontier(self, world: World) -> dict[bytes, bytes]:
        """Return the frontier in the store."""
        found: Any = world.store.values[keys.run_keys(self.run).frontier.encode()]
        return found

    def tokens(self, number: int) -> list[int]:
        """Token ids that no other turn has."""
        self.token_ids += number
        return [*range(self.token_ids - number, self.token_ids)]


async def patiently(call: Any) -> Any:
    while True:
        try:
            return await call()
        except UnavailableError:
            await asyncio.sleep(0.1)
