"""A generator process that plays the guessing game with the newest weights of the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from turnstream.calls import Calls, connect_calls
from turnstream.errors import (
    EndOfRunError,
    InvalidConfigError,
    NotReadyError,
    ReleasedError,
    UnavailableError,
)
from turnstream.generator import AsyncPublisher, AsyncTrajectoryWriter
from turnstream.types import VersionAnnounced
from turnstream.types.names import RunId
from turnstream.weights import fetch_weights
from turnstream_server.generators import guessing
from turnstream_server.generators.config import LiveGeneratorConfig
from turnstream_server.generators.metrics import PublisherMetrics
from turnstream_server.models.policy import load_policy
from turnstream_server.models.sampling import sample_tokens
from turnstream_server.models.sampling_params import SamplingParams
from turnstream_server.telemetry.instruments import collected, gauge
from turnstream_server.telemetry.readiness import Readiness

logger = logging.getLogger(__name__)

_VERSION = gauge(
    "turnstream_generator_version", "Policy version that samples; -1 before the first."
)

_POLL_S: Final = 0.2
_FETCH_TIMEOUT_S: Final = 5.0
_PARAMS: Final = SamplingParams(temperature=1.0)


def run_live_generator(config: LiveGeneratorConfig, readiness: Readiness | None = None) -> None:
    """Play until the run is closed, `max_groups` are played or SIGTERM or SIGINT comes.

    Games that a signal interrupts are abandoned.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    asyncio.run(_generate_until_signal(config, readiness))


async def generate(config: LiveGeneratorConfig, readiness: Readiness | None = None) -> None:
    """Play until the run is closed or `max_groups` are played."""
    try:
        with (
            contextlib.closing(connect_calls(config.redis_url)) as calls,
            tempfile.TemporaryDirectory(prefix="turnstream-weights-") as temporary,
        ):
            run = calls.find_run(config.run)
            config = replace(config, run=run)
            policy = NewestPolicy(calls, run, cache=config.cache or Path(temporary))
            await policy.wait_for_first(timeout_s=config.timeout_s)
            if readiness is not None:
                readiness.reached("weights")
            async with AsyncPublisher(
                config.redis_url,
                config.run,
                writer=config.writer,
                admission_timeout_s=config.timeout_s,
            ) as publisher:
                with collected(PublisherMetrics("generator", publisher.statistics)):
                    await _LiveGenerator(config, publisher, policy).play()
    except BaseExceptionGroup as errors:
        # The first error stops all tasks of a generator.
        raise _first(errors) from errors


class _Response(NamedTuple):
    """The token of a response, its log-probability, and the version of the weights."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    version: int


class _Request(NamedTuple):
    """A prompt that waits for its response."""

    prompt_ids: NDArray[np.int32]
    response: asyncio.Future[_Response]


class _LiveGenerator:
    """Plays groups concurrently, a task each, and samples all waiting prompts as one batch.

    Every admitted group is played at once. A generator that waited for another admission first
    could block the trainer, if another generator did the same.
    """

    def __init__(
        self, config: LiveGeneratorConfig, publisher: AsyncPublisher, policy: NewestPolicy
    ) -> None:
        self._config = config
        self._publisher = publisher
        self._policy = policy
        self._secrets = np.random.default_rng(config.seed)
        self._rng = np.random.default_rng(config.seed)
        # Group ids are used once, also after a restart of the same writer.
        self._prefix = f"{config.writer}-{secrets.token_hex(4)}"
        self._requests: asyncio.Queue[_Request | None] = asyncio.Queue()
        self._num_started = 0
        self._num_running = 0
        self._is_closed = False

    async def play(self) -> None:
        """Play until the run is closed or `max_groups` are played."""
        async with asyncio.TaskGroup() as tasks:
            while self._start_groups(tasks):
                waiting = [await self._requests.get()]
                while not self._requests.empty():
                    waiting.append(self._requests.get_nowait())
                requests = [each for each in waiting if each is not None]
                if requests:
                    await self._respond(requests)
        logger.info("generator done", extra={"groups": self._num_started})

    def _start_groups(self, tasks: asyncio.TaskGroup) -> bool:
        """Request groups up to the limit; return whether any is requested or played."""
        max_groups = self._config.max_groups
        while (
            not self._is_closed
            and self._num_running < self._config.groups_per_round
            and not (max_groups and self._num_started == max_groups)
        ):
            tasks.create_task(self._play_group(self._num_started))
            self._num_started += 1
            self._num_running += 1
        return self._num_running > 0

    async def _play_group(self, number: int) -> None:
        """Request a group, and play its games, which have one secret."""
        size = self._config.group_size
        episode, prompt_ids = guessing.reset(seed=int(self._secrets.integers(1 << 62)))
        try:
            async with (
                self._publisher.group(
                    f"{self._prefix}-{number}", size, prompt_uid=f"secret-{episode.secret}"
                ) as group,
                asyncio.TaskGroup() as games,
            ):
                for sample in range(size):
                    games.create_task(
                        self._play_game(group.trajectory(sample), episode, prompt_ids)
                    )
        except EndOfRunError:
            self._is_closed = True
        self._num_running -= 1
        self._requests.put_nowait(None)

    async def _play_game(
        self,
        trajectory: AsyncTrajectoryWriter,
        episode: guessing.Episode,
        prompt_ids: NDArray[np.int32],
    ) -> None:
        """Play one game to its end; publish each turn when it is sampled."""
        while True:
            request = _Request(prompt_ids, asyncio.get_running_loop().create_future())
            self._requests.put_nowait(request)
            response = await request.response
            await trajectory.append(
                prompt_ids,
                response.token_ids,
                logprobs=response.logprobs,
                policy_version=response.version,
                anchor=prompt_ids.astype("<i4").tobytes(),  # the tokens so far are its state
            )
            answer = guessing.step(episode, response.token_ids)
            if answer.is_done:
                await trajectory.seal(answer.reward, sampling={"temperature": _PARAMS.temperature})
                return
            episode = answer.episode
            prompt_ids = np.concatenate((prompt_ids, response.token_ids, answer.observation_ids))

    async def _respond(self, requests: list[_Request]) -> None:
        await asyncio.to_thread(self._policy.refresh)
        sampled = await asyncio.to_thread(
            sample_tokens,
            self._policy.model,
            [each.prompt_ids for each in requests],
            params=_PARAMS,
            rng=self._rng,
        )
        for request, token_ids, logprobs in zip(requests, *sampled, strict=True):
            if not request.response.cancelled():
                request.response.set_result(_Response(token_ids, logprobs, self._policy.version))


class NewestPolicy:
    """A model that can be updated.

    Attributes:
        model: in evaluation mode, with the weights named `version`.
        version: -1 before the first weights.
    """

    model: PreTrainedModel

    def __init__(self, calls: Calls, run: RunId, *, cache: Path) -> None:
        """Create a policy without weights; `cache` receives those that come over HTTP."""
        self.version = -1
        self._calls = calls
        self._run = run
        self._cache = cache
        self._next_fetch_s = 0.0

    async def wait_for_first(self, *, timeout_s: float) -> None:
        """Load the first weights; NotReadyError if none are announced within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            await asyncio.to_thread(self.refresh)
            if self.version >= 0:
                return
            if time.monotonic() >= deadline_s:
                raise NotReadyError(f"run {self._run!r}: no weights within {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)

    def refresh(self) -> None:
        """Load newer weights, if any. Blocks; an error says why they cannot be loaded.

        If their server is away, the weights stay as they are. It is asked again after 5 s.
        """
        while time.monotonic() >= self._next_fetch_s:
            announced = self._calls.newest_version(self._run)
            if announced is None or announced.version <= self.version:
                return
            try:
                self.model = load_policy(weights_folder(announced, cache=self._cache))
                self.version = announced.version
                _VERSION.set(announced.version)
            except UnavailableError as error:
                self._next_fetch_s = time.monotonic() + _FETCH_TIMEOUT_S
                logger.warning("weights %d cannot be fetched: %s", announced.version, error)
            except (InvalidConfigError, ReleasedError):
                # The trainer keeps only the newest few: these may be deleted.
                newest = self._calls.newest_version(self._run)
                if newest is None or newest.version == announced.version:
                    raise


def weights_folder(announced: VersionAnnounced, *, cache: Path) -> Path:
    """Return the local folder of announced weights; for its errors see `fetch_weights`."""
    try:
        return fetch_weights(announced.weights_uri, cache=cache, timeout_s=_FETCH_TIMEOUT_S)
    except InvalidConfigError as error:
        message = f"version {announced.version} has {announced.weights_uri!r}: {error}"
        raise InvalidConfigError("weights_uri", message) from error


def _first(errors: BaseExceptionGroup) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _generate_until_signal(config: LiveGeneratorConfig, readiness: Readiness | None) -> None:
    playing = asyncio.create_task(generate(config, readiness))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, playing.cancel)
    try:
        await playing
    except asyncio.CancelledError:
        logger.info("generator stopped by a signal")
