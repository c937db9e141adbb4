"""Leave to play: groups that one generator has asked for, and those it got."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import EndOfRunError
from turnstream.generator import AsyncPublisher
from turnstream.generator.async_publisher import AsyncGroupWriter
from turnstream_server.generators.environments.guessing import Episode, GuessingGame


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitPlan:
    """What groups one generator asks for.

    Attributes:
        writer: begins the ids of its groups.
        group_size: trajectories of a group.
        max_asked: groups that wait for leave at a time, and most that are played together.
        max_groups: ends after so many; 0 goes on until the run is closed.
        seed: of the games.
    """

    writer: str
    group_size: int
    max_asked: int
    max_groups: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Visit:
    """A group that may be played now: `group_size` games that begin alike.

    Attributes:
        group: open; what is not sealed when `is_over` is set counts as abandoned.
        group_size: its trajectories.
        episode: how every game of it begins.
        prompt_ids: int32, the first prompt.
    """

    group: AsyncGroupWriter
    group_size: int
    episode: Episode
    prompt_ids: NDArray[np.int32]
    is_over: asyncio.Event


class Visits:
    """Asks for groups ahead and hands over those that were granted.

    A generator must not wait for leave while it holds groups that it could play: two that do would
    wait for each other, and the trainer for both. So whatever is granted is handed over, and what
    is not goes on waiting for the next round.

    Args:
        publisher: opens the groups.
        tasks: holds a task for each group that waits or is open; when it is cancelled, they are
            abandoned.
        plan: what to ask for.
        game: is reset once for every group.
    """

    def __init__(
        self,
        publisher: AsyncPublisher,
        tasks: asyncio.TaskGroup,
        plan: VisitPlan,
        *,
        game: GuessingGame,
    ) -> None:
        self.num_taken = 0
        self._publisher = publisher
        self._tasks = tasks
        self._plan = plan
        self._game = game
        self._rng = np.random.default_rng(plan.seed)
        # The same writer may have been here before: ids of groups are used once.
        self._prefix = f"{plan.writer}-{secrets.token_hex(4)}"
        self._granted: asyncio.Queue[Visit | None] = asyncio.Queue()
        self._num_asked = 0
        self._is_closed = False

    async def take(self) -> list[Visit]:
        """The groups granted by now, at least one; none at the end of the run or of the plan."""
        while self._may_ask():
            self._ask()
        if self._is_closed or self._num_asked == self.num_taken:
            return []
        taken = [await self._granted.get()]
        while not self._granted.empty():
            taken.append(self._granted.get_nowait())
        visits = [visit for visit in taken if visit is not None]
        self.num_taken += len(visits)
        return visits

    def _may_ask(self) -> bool:
        num_waiting = self._num_asked - self.num_taken
        is_all = self._plan.max_groups and self._num_asked == self._plan.max_groups
        return not (self._is_closed or is_all) and num_waiting < self._plan.max_asked

    def _ask(self) -> None:
        episode, prompt_ids = self._game.reset(seed=int(self._rng.integers(1 << 62)))
        self._tasks.create_task(self._visit(self._num_asked, episode, prompt_ids))
        self._num_asked += 1

    async def _visit(self, number: int, episode: Episode, prompt_ids: NDArray[np.int32]) -> None:
        """One group, from asking for it to the end of its games."""
        writer = self._publisher.group(
            f"{self._prefix}-{number}",
            self._plan.group_size,
            prompt_uid=f"secret-{episode.secret}",
        )
        try:
            async with writer as group:
                visit = Visit(
                    group=group,
                    group_size=self._plan.group_size,
                    episode=episode,
                    prompt_ids=prompt_ids,
                    is_over=asyncio.Event(),
                )
                self._granted.put_nowait(visit)
                await visit.is_over.wait()
        except EndOfRunError:
            self._is_closed = True
            self._granted.put_nowait(None)
