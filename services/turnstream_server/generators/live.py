"""A generator process that plays an environment with the newest weights of the run."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass, field, replace

import torch

from turnstream.errors import InvalidConfigError
from turnstream.generator import AsyncPublisher
from turnstream.store.client.connection import connect
from turnstream.store.run.configs import open_run
from turnstream_server.generators.environments.guessing import GuessingGame
from turnstream_server.generators.newest_policy import NewestPolicy
from turnstream_server.generators.playing import Player, Visits

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGeneratorConfig:
    """One generator process.

    Attributes:
        redis_url: the store.
        run: name of the run; it must exist.
        writer: name of this process, different in every generator of the run; its group ids
            begin with it.
        game: the environment.
        group_size: trajectories of a group, which share one secret number.
        groups_per_round: groups played together as one batch of episodes.
        temperature: sampling temperature.
        seed: seed of secrets and sampling, different in every generator of a run.
        max_groups: stops after so many groups; 0 continues until the run is closed.
        num_threads: threads of torch; 0 takes torch's default.
        timeout_s: longest wait for the first weights, and for the admission of a group.
    """

    redis_url: str
    run: str
    writer: str
    game: GuessingGame = field(default_factory=GuessingGame)
    group_size: int = 8
    groups_per_round: int = 32
    temperature: float = 1.0
    seed: int = 0
    max_groups: int = 0
    num_threads: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("group_size", "groups_per_round"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(name, f"{getattr(self, name)} is not at least 1")
        if not self.temperature > 0:
            raise InvalidConfigError("temperature", f"{self.temperature} is not above 0")


def run_live_generator(config: LiveGeneratorConfig) -> None:
    """Play until the run is closed, `max_groups` are played or SIGTERM or SIGINT comes.

    Games that a signal interrupts are abandoned.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    asyncio.run(_generate_until_signal(config))


async def generate(config: LiveGeneratorConfig) -> None:
    """Play until the run is closed or `max_groups` are played."""
    try:
        with connect(config.redis_url) as client:
            config = replace(config, run=open_run(client, config.run))
            policy = NewestPolicy(client, config.run)
            await policy.wait_for_first(timeout_s=config.timeout_s)
            await _play_rounds(config, policy)
    except BaseExceptionGroup as errors:
        # The first error stops all tasks of a generator.
        raise _first(errors) from errors


async def _play_rounds(config: LiveGeneratorConfig, policy: NewestPolicy) -> None:
    rng = torch.Generator().manual_seed(config.seed)
    async with (
        AsyncPublisher(
            config.redis_url,
            config.run,
            writer=config.writer,
            admission_timeout_s=config.timeout_s,
        ) as publisher,
        asyncio.TaskGroup() as tasks,
    ):
        visits = Visits(
            publisher,
            tasks,
            game=config.game,
            writer=config.writer,
            group_size=config.group_size,
            max_asked=config.groups_per_round,
            max_groups=config.max_groups,
            seed=config.seed,
        )
        while table := await visits.take():
            await asyncio.to_thread(policy.refresh)
            player = Player(
                model=policy.model,
                version=policy.version,
                temperature=config.temperature,
                rng=rng,
            )
            await player.play(config.game, table)
        logger.info("generator done", extra={"groups": visits.num_taken})


def _first(errors: BaseExceptionGroup) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _generate_until_signal(config: LiveGeneratorConfig) -> None:
    playing = asyncio.create_task(generate(config))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, playing.cancel)
    try:
        await playing
    except asyncio.CancelledError:
        logger.info("generator stopped by a signal")
