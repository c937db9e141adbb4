"""The composition root: settings and a command's options in, a running service out.

Services are imported when they are started, so that a command line costs no torch and no gRPC.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream_server import failpoints
from turnstream_server.keys.store import requires_key
from turnstream_server.observed import batcher_check, observe_process, run_check
from turnstream_server.options import ListenOptions, split_address
from turnstream_server.settings import Settings, checked_gateway_url
from turnstream_server.telemetry.readiness import Readiness, folder_check, store_check
from turnstream_server.tls import read_tls
from turnstream_server.waits import (
    generator_url,
    store_url,
    wait_for_batcher,
    wait_for_own_key,
    wait_for_run,
    wait_for_store,
)

if TYPE_CHECKING:
    from turnstream.batching.config import BatchingConfig
    from turnstream_server.engine.options import EngineOptions
    from turnstream_server.generators.config import LiveGeneratorConfig, ReplayConfig
    from turnstream_server.sampling.config import SamplerOptions
    from turnstream_server.trainer.config import TrainerConfig


def start_batcher(settings: Settings, given: ListenOptions) -> None:
    """Serve batches until SIGTERM or SIGINT, as soon as the store answers."""
    from turnstream_server.batcher.assembly.archive import archive_step
    from turnstream_server.batcher.planner.snapshotting import Upkeep
    from turnstream_server.batcher.serving.service import BatcherOptions, run_batcher

    readiness, redis_url = _reach_store(settings, given, service="batcher")
    folder = settings.archive_dir
    archive = functools.partial(archive_step, redis_url, folder=folder) if folder else None
    listen = given.listen or f"{settings.batcher_host}:{settings.batcher_port}"
    options = BatcherOptions(
        redis_url=redis_url,
        listen=listen,
        advertise=settings.batcher_advertise,
        address_file=given.address_file,
        requires_key=_requires_key(settings, redis_url, listen, is_insecure=given.is_insecure),
        tls=read_tls(settings.tls_cert, settings.tls_key),
        get_wait_max_s=settings.get_wait_max_s,
        leader_lease_s=settings.lease_s,
        cache_bytes=settings.assembly_cache_bytes,
        upkeep=Upkeep(archive=archive),
        readiness=readiness,
    )
    if folder:
        readiness.add("archive", folder_check(folder, is_written=True))
    run_batcher(options)


def start_gateway(
    settings: Settings,
    given: ListenOptions,
    *,
    folder: Path | None,
    url: str = "",
    engines: Sequence[str],
    engine_timeout_s: float,
) -> None:
    """Serve HTTP until SIGTERM or SIGINT, as soon as the store answers."""
    from turnstream_server.batcher.assembly.assembler import read_share
    from turnstream_server.gateway.config import EngineAddress, GatewayOptions
    from turnstream_server.gateway.service import run_gateway

    addresses = tuple(map(EngineAddress.parse, engines))
    api_key = settings.engine_api_key.get_secret_value() if settings.engine_api_key else ""
    readiness, redis_url = _reach_store(settings, given, service="gateway")
    listen = given.listen or f"{settings.http_host}:{settings.http_port}"
    options = GatewayOptions(
        redis_url=redis_url,
        listen=listen,
        folder=folder,
        read_share=functools.partial(read_share, redis_url),
        address_file=given.address_file,
        public_url=checked_gateway_url(url or settings.http_url, field="--url"),
        names=frozenset(each.strip().lower() for each in settings.http_names.split(",") if each),
        requires_key=_requires_key(settings, redis_url, listen, is_insecure=given.is_insecure),
        tls=read_tls(settings.tls_cert, settings.tls_key),
        readiness=readiness,
        durability=settings.durability,
        engines=addresses,
        engine_timeout_s=engine_timeout_s,
        engine_api_key=api_key,
    )
    run_gateway(options)


def _reach_store(
    settings: Settings, given: ListenOptions, *, service: str
) -> tuple[Readiness, str]:
    """Observe the process and wait for the store; return the readiness and the address."""
    insecure, listen = given.is_insecure, given.metrics_listen
    readiness = observe_process(settings, service=service, listen=listen, is_insecure=insecure)
    readiness.wait_for("store", "it has not answered yet")
    redis_url = store_url(settings, given.redis_url)
    failpoints.arm(settings.failpoint)
    wait_for_store(redis_url, durability=settings.durability, timeout_s=settings.start_wait_s)
    return readiness, redis_url


def start_trainer(
    settings: Settings, config: TrainerConfig, *, new_run: BatchingConfig | None = None
) -> None:
    """Train until the run ends, or SIGTERM or SIGINT comes.

    An empty `batcher_target` stands for the batchers that are registered in the store. `new_run`
    has the settings of a run to create if it does not exist; None waits for it.
    """
    from turnstream_server.trainer.reporting.sinks import require_packages

    require_packages(config)
    from turnstream_server.trainer.publishing import WeightsAccess
    from turnstream_server.trainer.service import run_trainer

    config = dataclasses.replace(
        config, metrics_listen=config.metrics_listen or settings.metrics_listen
    )
    readiness = observe_process(settings, service="trainer", listen=config.metrics_listen)
    readiness.wait_for("engine", "the model is not loaded yet")
    redis_url, wait_s = store_url(settings, config.redis_url), settings.start_wait_s
    readiness.add("store", store_check(redis_url, durability=settings.durability))
    readiness.add("run", run_check(redis_url, config.run))
    readiness.add("folder", folder_check(config.folder, is_written=True))
    if not config.batcher_target:
        readiness.add("batcher", batcher_check(redis_url))
    failpoints.arm(settings.failpoint)
    if new_run is not None:
        wait_for_store(redis_url, durability=settings.durability, timeout_s=wait_s)
        with connect(redis_url) as client:
            create_run(client, config.run, new_run)
    wait_for_own_key(settings)
    if not config.batcher_target:
        wait_for_run(redis_url, config.run, timeout_s=wait_s)
        wait_for_batcher(redis_url, timeout_s=wait_s)
    config = dataclasses.replace(config, redis_url=redis_url)
    if settings.push_api_key is not None:
        api_key = settings.push_api_key.get_secret_value()
        config = dataclasses.replace(config, push_api_key=api_key)
    weights_access = None
    if config.weights_listen:
        listen, insecure = config.weights_listen, settings.insecure
        weights_access = WeightsAccess(
            redis_url,
            config.run,
            requires_key=_requires_key(settings, redis_url, listen, is_insecure=insecure),
            tls=read_tls(settings.tls_cert, settings.tls_key),
        )
    run_trainer(config, readiness, weights_access)


def start_live_generator(
    settings: Settings, config: LiveGeneratorConfig, *, metrics_listen: str = ""
) -> None:
    """Play until the run ends, or SIGTERM or SIGINT comes."""
    from turnstream_server.generators.live import run_live_generator

    readiness = observe_process(
        settings, service="generator", name=config.writer, listen=metrics_listen
    )
    readiness.wait_for("weights", "no weights are loaded yet")
    config = dataclasses.replace(config, redis_url=generator_url(settings, config.redis_url))
    readiness.add("store", store_check(config.redis_url, durability=settings.durability))
    readiness.add("run", run_check(config.redis_url, config.run))
    wait_for_run(config.redis_url, config.run, timeout_s=settings.start_wait_s)
    run_live_generator(config, readiness)


def start_replay(settings: Settings, config: ReplayConfig, *, metrics_listen: str = "") -> None:
    """Publish one share of a file."""
    from turnstream_server.generators.replay import run_replay

    readiness = observe_process(
        settings, service="replayer", name=config.writer, listen=metrics_listen
    )
    config = dataclasses.replace(config, redis_url=generator_url(settings, config.redis_url))
    readiness.add("store", store_check(config.redis_url, durability=settings.durability))
    readiness.add("run", run_check(config.redis_url, config.run))
    run_replay(config)


def start_engine(settings: Settings, options: EngineOptions, *, metrics_listen: str = "") -> None:
    """Run the commands of hosted models until SIGTERM or SIGINT.

    An empty `batcher_target` stands for the batchers that are registered in the store.
    """
    from turnstream_server.engine.service import run_engine

    readiness = observe_process(settings, service="engine", listen=metrics_listen)
    readiness.wait_for("base_models", "they are not loaded yet")
    redis_url, wait_s = store_url(settings, options.redis_url), settings.start_wait_s
    readiness.add("store", store_check(redis_url, durability=settings.durability))
    readiness.add("folder", folder_check(options.folder, is_written=True))
    if not options.batcher_target:
        readiness.add("batcher", batcher_check(redis_url))
    failpoints.arm(settings.failpoint)
    wait_for_store(redis_url, durability=settings.durability, timeout_s=wait_s)
    wait_for_own_key(settings)
    if not options.batcher_target:
        wait_for_batcher(redis_url, timeout_s=wait_s)
    options = dataclasses.replace(options, redis_url=redis_url)
    run_engine(options, readiness=readiness)


def start_sampler(settings: Settings, options: SamplerOptions, *, metrics_listen: str = "") -> None:
    """Sample for sampling sessions until SIGTERM or SIGINT, as soon as the store answers."""
    from turnstream_server.sampling.service import run_sampler

    readiness = observe_process(settings, service="sampler", listen=metrics_listen)
    readiness.wait_for("base_models", "they are not loaded yet")
    redis_url = store_url(settings, options.redis_url)
    readiness.add("store", store_check(redis_url, durability=settings.durability))
    readiness.add("folder", folder_check(options.folder, is_written=False))
    failpoints.arm(settings.failpoint)
    wait_for_store(redis_url, durability=settings.durability, timeout_s=settings.start_wait_s)
    api_key = settings.push_api_key.get_secret_value() if settings.push_api_key else ""
    options = dataclasses.replace(options, redis_url=redis_url, push_api_key=api_key)
    run_sampler(options, readiness)


def _requires_key(settings: Settings, url: str, listen: str, *, is_insecure: bool) -> bool:
    """Return whether requests to an address need a key; errors as of `policy.requires_key`."""
    host, _ = split_address(listen, option="--listen")
    with connect(url) as client:
        return requires_key(
            client,
            host=host,
            key_file=settings.key_file,
            is_insecure=is_insecure or settings.insecure,
        )
