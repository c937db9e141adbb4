"""What the processes of one run share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulator.history import History
from simulator.processes import Process
from turnstream.batching.config import BatchingConfig
from turnstream.errors import UnavailableError
from turnstream.generator import AsyncPublisher
from turnstream_server.batcher.upkeep import Upkeep

URL = "redis://simulated"


@dataclass
class Life:
    """What the processes of one run share: its settings, and what is written down beside it.

    Attributes:
        config: that the run was made with.
        in_force: the config that it goes by now.
        ever_in_force: all that it went by, in order.
        another_config: draws what it may be revised to.
        is_closing: no new group is begun; what is open is brought to its end.
        is_ended: a trainer came to the end of the run.
        is_closed_for_good: nobody opens the run again.
        num_begun: groups that generators have begun.
        max_groups: how many they may.
        num_evals, max_evals: the same of evaluations.
        num_prompts: that the run carries.
        most_episodes: of one generator at a time.
        rotten: trajectories whose payload was damaged after they were planned.
        publishers: those that ever began, each in its process.
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
    num_begun: int = 0
    num_evals: int = 0
    max_evals: int = 0
    num_prompts: int = 0
    most_episodes: int = 1
    rotten: set[str] = field(default_factory=set)
    publishers: list[tuple[Process, AsyncPublisher]] = field(default_factory=list)
    token_ids: int = 0

    def __post_init__(self) -> None:
        self.in_force = self.config
        self.ever_in_force = [self.config]

    def goes_by(self, config: BatchingConfig) -> None:
        """A config is in force from now on."""
        self.in_force = config
        self.ever_in_force.append(config)
        self.history.may_release(retained=config.retain_checkpoints)

    def tokens(self, number: int) -> list[int]:
        """Token ids that no other turn has."""
        self.token_ids += number
        return [*range(self.token_ids - number, self.token_ids)]


async def patiently(call: Any) -> Any:
    """Call until the store can be reached."""
    while True:
        try:
            return await call()
        except UnavailableError:
            await asyncio.sleep(0.1)
