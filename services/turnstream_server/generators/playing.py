"""Games played side by side: one batch of responses for all of them, turn after turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from turnstream.generator.async_publisher import AsyncTrajectoryWriter
from turnstream_server.generators.environments.guessing import Episode, GuessingGame
from turnstream_server.generators.visits import Visit
from turnstream_server.models.sampling import SampledResponse, sample_batch


class _Seat(NamedTuple):
    """One game under way: where its turns go, how it stands, what the model sees next."""

    trajectory: AsyncTrajectoryWriter
    episode: Episode
    prompt_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Player:
    """Plays with one version of the weights.

    Attributes:
        model: in evaluation mode, with the weights named `version`.
        temperature: of sampling.
        rng: of sampling, on the device of the model.
    """

    model: PreTrainedModel
    version: int
    temperature: float
    rng: torch.Generator

    async def play(self, game: GuessingGame, visits: Sequence[Visit]) -> None:
        """Play every game of these groups to its end; each turn is published when it is sampled."""
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
        """The game after this response; None when it is over and its seal on the way."""
        await seat.trajectory.append(
            seat.prompt_ids,
            response.token_ids,
            logprobs=response.logprobs,
            policy_version=self.version,
            anchor=seat.prompt_ids.astype("<i4").tobytes(),  # all that was said is where it stands
        )
        answer = game.step(seat.episode, response.token_ids)
        if answer.is_done:
            sampling = {"temperature": self.temperature}
            seals.create_task(seat.trajectory.seal(answer.reward, sampling=sampling))
            return None
        prompt_ids = np.concatenate((seat.prompt_ids, response.token_ids, answer.observation_ids))
        return seat._replace(episode=answer.episode, prompt_ids=prompt_ids)
