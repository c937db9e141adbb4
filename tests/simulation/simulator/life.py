"""What the processes of one run share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from simulator.history import History
from simulator.processes import Process
from turnstream.batching.config import BatchingConfig
from turnstream.errors import UnavailableError
from turnstream.generator import AsyncPublisher
from turnstream_server.batcher.upkeep import Upkeep

URL = "memory://"


@dataclass
class Life:
    """What the processes of one run share: its settings, and what is written down beside it.

    Attributes:
        is_closing: no new group is begun; what is open is brought to its end.
        is_ended: a trainer came to the end of the run.
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
    max_groups: int
    history: History = field(default_factory=History)
    is_closing: bool = False
    is_ended: bool = False
    num_begun: int = 0
    num_evals: int = 0
    max_evals: int = 0
    num_prompts: int = 0
    most_episodes: int = 1
    rotten: set[str] = field(default_factory=set)
    publishers: list[tuple[Process, AsyncPublisher]] = field(default_factory=list)
    token_ids: int = 0

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
