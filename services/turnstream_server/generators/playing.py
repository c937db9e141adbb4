"""Groups of games: admission to play them, and one batch of responses per turn for all of them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from turnstream.errors import EndOfRunError
from turnstream.generator import AsyncGroupWriter, AsyncPublisher, AsyncTrajectoryWriter
from turnstream_server.generators.environments.guessing import Episode, GuessingGame
from turnstream_server.models.sampling import SampledResponse, sample_batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Visit:
    """An admitted group: `group_size` games with the same beginning.

    Attributes:
        group: open; trajectories that are not sealed when `is_over` is set count as abandoned.
        group_size: number of its trajectories.
        episode: beginning of every game.
        prompt_ids: int32, the first prompt.
    """

    group: AsyncGroupWriter
    group_size: int
    episode: Episode
    prompt_ids: NDArray[np.int32]
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class Visits:
    """Asks for groups ahead and returns the admitted ones.

    A generator that waits for admission while it holds groups could block the trainer, if another
    generator does the same. So every admitted group is played at once, and the others stay
    requested for the next round.

    Args:
        publisher: opens the groups.
        tasks: holds a task for each requested or open group; cancelled tasks abandon theirs.
        game: reset once for every group.
        writer: beginning of the group ids.
        group_size: trajectories of a group.
        max_asked: limit of the requested groups, and of those that are played together.
        max_groups: limit of all groups; 0 for none.
        seed: seed of the games.
    """

    def __init__(
        self,
        publisher: AsyncPublisher,
        tasks: asyncio.TaskGroup,
        *,
        game: GuessingGame,
        writer: str,
        group_size: int,
        max_asked: int,
        max_groups: int,
        seed: int,
    ) -> None:
        self.num_taken = 0
        self._publisher = publisher
        self._tasks = tasks
        self._game = game
        self._group_size = group_size
        self._max_asked = max_asked
        self._max_groups = max_groups
        self._rng = np.random.default_rng(seed)
        # Group ids are used once, also after a restart of the same writer.
        self._prefix = f"{writer}-{secrets.token_hex(4)}"
        self._admitted: asyncio.Queue[Visit | None] = asyncio.Queue()
        self._num_asked = 0
        self._is_closed = False

    async def take(self) -> list[Visit]:
        """Return the groups admitted so far, at least one; none after the last group."""
        while self._may_ask():
            self._ask()
        if self._is_closed or self._num_asked == self.num_taken:
            return []
        taken = [await self._admitted.get()]
        while not self._admitted.empty():
            taken.append(self._admitted.get_nowait())
        visits = [visit for visit in taken if visit is not None]
        self.num_taken += len(visits)
        return visits

    def _may_ask(self) -> bool:
        num_waiting = self._num_asked - self.num_taken
        is_all = self._max_groups and self._num_asked == self._max_groups
        return not (self._is_closed or is_all) and num_waiting < self._max_asked

    def _ask(self) -> None:
        episode, prompt_ids = self._game.reset(seed=int(self._rng.integers(1 << 62)))
        self._tasks.create_task(self._visit(self._num_asked, episode, prompt_ids))
        self._num_asked += 1

    async def _visit(self, number: int, episode: Episode, prompt_ids: NDArray[np.int32]) -> None:
        """Request one group, and keep it open until its games have ended."""
        size = self._group_size
        writer = self._publisher.group(
            f"{self._prefix}-{number}", size, prompt_uid=f"secret-{episode.secret}"
        )
        try:
            async with writer as group:
                visit = Visit(group=group, group_size=size, episode=episode, prompt_ids=prompt_ids)
                self._admitted.put_nowait(visit)
                await visit.is_over.wait()
        except EndOfRunError:
            self._is_closed = True
            self._admitted.put_nowait(None)


class _Seat(NamedTuple):
    """One game in progress: its trajectory, its state, and the next prompt of the model."""

    trajectory: AsyncTrajectoryWriter
    episode: Episode
    prompt_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Player:
    """Plays with one version of the weights.

    Attributes:
        model: in evaluation mode, with the weights named `version`.
        temperature: sampling temperature.
        rng: random numbers of the sampling, on the device of the model.
    """

    model: PreTrainedModel
    version: int
    temperature: float
    rng: torch.Generator

    async def play(self, game: GuessingGame, visits: Sequence[Visit]) -> None:
        """Play every game of these groups to its end; publish each turn when it is sampled."""
        seats = [
            _Seat(visit.group.trajectory(sample), visit.episode, visit.prompt_ids)
            for visit in visits
            for sample in range(visit.group_size)
        ]
        async with asyncio.TaskGroup() as seals:
            while seats:
                prompts = [seat.prompt_ids for seat in seats]
                responses = await asyncio.to_thread(self._sample, game, prompts)
                turns = [
                    await self._take_turn(game, seat, response, seals=seals)
                    for seat, response in zip(seats, responses, strict=True)
                ]
                seats = [seat for seat in turns if seat is not None]
        for visit in visits:
            visit.is_over.set()

    def _sample(
        self, game: GuessingGame, prompts: Sequence[NDArray[np.int32]]
    ) -> list[SampledResponse]:
        return sample_batch(
            self.model,
            prompts,
            max_new_tokens=game.max_response_tokens,
            temperature=self.temperature,
            generator=self.rng,
        )

    async def _take_turn(
        self,
        game: GuessingGame,
        seat: _Seat,
        response: SampledResponse,
        *,
        seals: asyncio.TaskGroup,
    ) -> _Seat | None:
        """Return the game after this response; None if it has ended and its seal is sent."""
        await seat.trajectory.append(
            seat.prompt_ids,
            response.token_ids,
            logprobs=response.logprobs,
            policy_version=self.version,
            anchor=seat.prompt_ids.astype("<i4").tobytes(),  # the tokens so far are its state
        )
        answer = game.step(seat.episode, response.token_ids)
        if answer.is_done:
            sampling = {"temperature": self.temperature}
            seals.create_task(seat.trajectory.seal(answer.reward, sampling=sampling))
            return None
        prompt_ids = np.concatenate((seat.prompt_ids, response.token_ids, answer.observation_ids))
        return seat._replace(episode=answer.episode, prompt_ids=prompt_ids)
