"""The composition root: settings and a command's options in, a running service out.

Services are imported when they are started, so that a command line costs no torch and no gRPC.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import redis

from turnstream.errors import RunNotFoundError, UnavailableError
from turnstream.service import DEFAULT_URL, URL_VARIABLE
from turnstream.store.client.connection import checked_url, connect
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run
from turnstream.store.run.batchers import wait_for_batchers
from turnstream.store.run.configs import read_config
from turnstream.store.run.runs import create_run
from turnstream.store.waits.wait_warnings import WaitWarnings
from turnstream_server import failpoints
from turnstream_server.logs import configure_logging
from turnstream_server.settings import Settings

if TYPE_CHECKING:
    from turnstream.batching.config import BatchingConfig
    from turnstream_server.engine.options import EngineOptions
    from turnstream_server.generators.config import LiveGeneratorConfig, ReplayConfig
    from turnstream_server.sampling.config import SamplerOptions
    from turnstream_server.trainer.config import TrainerConfig

_logger = logging.getLogger(__name__)

_RETRY_S: Final = 0.5
"""Seconds between two attempts; connecting to a store that is away takes as long again."""

_Result = TypeVar("_Result")


def store_url(settings: Settings, given: str = "") -> str:
    """Return the address of a store that runs already.

    Args:
        settings: name a store if `given` is empty.
        given: the option `--redis`; without both it is the default of `turnstream up`.
    """
    if given:
        return checked_url(given, field="--redis")
    if settings.redis_url is None:
        return DEFAULT_URL
    return checked_url(settings.redis_url.get_secret_value(), field=URL_VARIABLE)


def start_batcher(
    settings: Settings, *, redis_url: str, listen: str | None, address_file: Path | None
) -> None:
    """Serve batches until SIGTERM or SIGINT, as soon as the store answers."""
    from turnstream_server.batcher.assembly.archive import archive_step
    from turnstream_server.batcher.planner.snapshotting import Upkeep
    from turnstream_server.batcher.serving.service import BatcherOptions, run_batcher
    from turnstream_server.bus.release.compact_records import LedgerFolder

    redis_url = store_url(settings, redis_url)
    configure_logging(settings.log_level, service="batcher")
    failpoints.arm(settings.failpoint)
    wait_for_store(redis_url, timeout_s=settings.start_wait_s)
    folder = settings.archive_dir
    archive = functools.partial(archive_step, redis_url, folder=folder) if folder else None
    hot_batches = settings.ledger_hot_batches
    ledger_folder = LedgerFolder(folder=folder, hot_batches=hot_batches) if folder else None
    options = BatcherOptions(
        redis_url=redis_url,
        listen=listen or f"{settings.batcher_host}:{settings.batcher_port}",
        advertise=settings.batcher_advertise,
        address_file=address_file,
        get_wait_max_s=settings.get_wait_max_s,
        leader_lease_s=settings.lease_s,
        cache_bytes=settings.assembly_cache_bytes,
        upkeep=Upkeep(archive=archive, ledger_folder=ledger_folder),
    )
    run_batcher(options)


def start_gateway(
    settings: Settings,
    *,
    redis_url: str,
    folder: Path | None,
    listen: str | None,
    address_file: Path | None,
) -> None:
    """Serve the Tinker API until SIGTERM or SIGINT, as soon as the store answers."""
    from turnstream_server.gateway.config import GatewayOptions
    from turnstream_server.gateway.service import run_gateway

    redis_url = store_url(settings, redis_url)
    configure_logging(settings.log_level, service="gateway")
    failpoints.arm(settings.failpoint)
    wait_for_store(redis_url, timeout_s=settings.start_wait_s)
    keys = settings.api_keys.get_secret_value().split(",") if settings.api_keys else ()
    options = GatewayOptions(
        redis_url=redis_url,
        listen=listen or f"{settings.http_host}:{settings.http_port}",
        folder=folder,
        address_file=address_file,
        api_keys=frozenset(filter(None, (key.strip() for key in keys))),
    )
    run_gateway(options)


def start_trainer(
    settings: Settings, config: TrainerConfig, *, new_run: BatchingConfig | None = None
) -> None:
    """Train until the run ends, or SIGTERM or SIGINT comes.

    Args:
        settings: those of the environment.
        config: an empty `batcher_target` stands for the batchers that are registered in the store.
        new_run: settings of the run, which is created if it does not exist; None waits for it.
    """
    from turnstream_server.trainer.reporting.sinks.packages import require_packages

    require_packages(config)
    from turnstream_server.trainer.service import run_trainer

    redis_url, wait_s = store_url(settings, config.redis_url), settings.start_wait_s
    configure_logging(settings.log_level, service="trainer")
    failpoints.arm(settings.failpoint)
    if new_run is not None:
        wait_for_store(redis_url, timeout_s=wait_s)
        with connect(redis_url) as client:
            create_run(client, config.run, new_run)
    if not config.batcher_target:
        wait_for_run(redis_url, config.run, timeout_s=wait_s)
        target = wait_for_batcher(redis_url, timeout_s=wait_s)
        config = dataclasses.replace(config, batcher_target=target)
    if settings.push_api_key is not None:
        api_key = settings.push_api_key.get_secret_value()
        config = dataclasses.replace(config, push_api_key=api_key)
    run_trainer(config)


def start_live_generator(settings: Settings, config: LiveGeneratorConfig) -> None:
    """Play until the run ends, or SIGTERM or SIGINT comes."""
    from turnstream_server.generators.live import run_live_generator

    config = dataclasses.replace(config, redis_url=store_url(settings, config.redis_url))
    configure_logging(settings.log_level, service=config.writer)
    wait_for_run(config.redis_url, config.run, timeout_s=settings.start_wait_s)
    run_live_generator(config)


def start_replay(settings: Settings, config: ReplayConfig) -> None:
    """Publish one share of a file."""
    from turnstream_server.generators.replay import run_replay

    config = dataclasses.replace(config, redis_url=store_url(settings, config.redis_url))
    configure_logging(settings.log_level, service=config.writer)
    run_replay(config)


def start_engine(settings: Settings, options: EngineOptions) -> None:
    """Run the commands of hosted models until SIGTERM or SIGINT.

    An empty `batcher_target` stands for the batchers that are registered in the store.
    """
    from turnstream_server.engine.service import run_engine

    redis_url, wait_s = store_url(settings, options.redis_url), settings.start_wait_s
    configure_logging(settings.log_level, service="engine")
    failpoints.arm(settings.failpoint)
    wait_for_store(redis_url, timeout_s=wait_s)
    target = options.batcher_target or wait_for_batcher(redis_url, timeout_s=wait_s)
    run_engine(dataclasses.replace(options, redis_url=redis_url, batcher_target=target))


def start_sampler(settings: Settings, options: SamplerOptions) -> None:
    """Sample for sampling sessions until SIGTERM or SIGINT, as soon as the store answers."""
    from turnstream_server.sampling.service import run_sampler

    redis_url = store_url(settings, options.redis_url)
    configure_logging(settings.log_level, service="sampler")
    failpoints.arm(settings.failpoint)
    wait_for_store(redis_url, timeout_s=settings.start_wait_s)
    api_key = settings.push_api_key.get_secret_value() if settings.push_api_key else ""
    run_sampler(dataclasses.replace(options, redis_url=redis_url, push_api_key=api_key))


def wait_for_store(url: str, *, timeout_s: float) -> None:
    """Return as soon as the store answers."""

    def ping(client: redis.Redis) -> None:
        with translating():
            client.ping()

    _retry(url, ping, timeout_s=timeout_s)


def wait_for_run(url: str, run: str, *, timeout_s: float) -> None:
    """Return as soon as the run exists."""
    _retry(url, lambda client: read_config(client, find_run(client, run)), timeout_s=timeout_s)


def wait_for_batcher(url: str, *, timeout_s: float) -> str:
    """Return the addresses of the registered batchers, with commas between them."""
    return _retry(
        url, lambda client: ",".join(wait_for_batchers(client, timeout_s=0)), timeout_s=timeout_s
    )


def _retry(url: str, attempt: Callable[[redis.Redis], _Result], *, timeout_s: float) -> _Result:
    """Repeat an attempt while something is away; warn after 5 s, then every 30 s."""
    began_s, warnings = time.monotonic(), WaitWarnings()
    while True:
        try:
            with connect(url, num_retries=0) as client:
                return attempt(client)
        except (UnavailableError, RunNotFoundError) as error:
            waited_s = time.monotonic() - began_s
            if waited_s >= timeout_s:
                raise
            if warnings.is_due(waited_s):
                _logger.warning("waiting for %.0f s: %s", waited_s, error)
        time.sleep(_RETRY_S)
