"""The composition root: settings and a command's options in, a running service out.

Services are imported when they are started, so that a command line costs no torch and no gRPC.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from turnstream.service import DEFAULT_URL, URL_VARIABLE
from turnstream.store.connection import checked_url
from turnstream_server import failpoints
from turnstream_server.logs import configure_logging
from turnstream_server.settings import Settings

if TYPE_CHECKING:
    from turnstream_server.generators.live import LiveGeneratorConfig
    from turnstream_server.generators.replay import ReplayConfig
    from turnstream_server.trainer.config import TrainerConfig


def store_url(settings: Settings, given: str | None = None) -> str:
    """Return the address of a store that runs already.

    Args:
        settings: name a store if `given` does not.
        given: the option `--redis`; without both it is the default of `turnstream up`.

    Raises:
        InvalidConfigError: the address has another form.
    """
    if given:
        return checked_url(given, field="--redis")
    if settings.redis_url is None:
        return DEFAULT_URL
    return checked_url(settings.redis_url.get_secret_value(), field=URL_VARIABLE)


def start_batcher(
    settings: Settings, *, redis_url: str, listen: str | None, address_file: Path | None
) -> None:
    """Serve batches until SIGTERM or SIGINT."""
    from turnstream_server.batcher.archive import archive_step
    from turnstream_server.batcher.options import BatcherOptions
    from turnstream_server.batcher.service import run_batcher
    from turnstream_server.batcher.upkeep import Upkeep
    from turnstream_server.bus.cold import LedgerFolder

    configure_logging(settings.log_level, service="batcher")
    failpoints.arm(settings.failpoint)
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


def start_trainer(settings: Settings, config: TrainerConfig) -> int:
    """Train until the run ends, or SIGTERM or SIGINT comes; gives the exit status."""
    from turnstream_server.trainer.service import run_trainer

    configure_logging(settings.log_level, service="trainer")
    failpoints.arm(settings.failpoint)
    return run_trainer(config)


def start_live_generator(settings: Settings, config: LiveGeneratorConfig) -> int:
    """Play until the run ends, or SIGTERM or SIGINT comes; gives the exit status."""
    from turnstream_server.generators.live import run_live_generator

    configure_logging(settings.log_level, service=config.writer)
    return run_live_generator(config)


def start_replay(settings: Settings, config: ReplayConfig) -> int:
    """Publish one share of a file; gives the exit status."""
    from turnstream_server.generators.replay import run_replay

    configure_logging(settings.log_level, service=config.writer)
    run_replay(config)
    return 0
