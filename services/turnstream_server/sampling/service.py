"""A sampler process: base models, or inference servers, and a loop for the samples of each."""

from __future__ import annotations

import contextlib
import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from turnstream.store.client.connection import connect
from turnstream_server.loops import stop_signals
from turnstream_server.models.spec import parse_bases
from turnstream_server.sampling.config import SamplerOptions

if TYPE_CHECKING:
    from turnstream_server.sampling.forwarding import Forwarder
    from turnstream_server.sampling.snapshots import Snapshots
    from turnstream_server.telemetry.readiness import Readiness

__all__ = ["SamplerOptions", "run_sampler", "sample_until"]

logger = logging.getLogger(__name__)

_MAX_UNFINISHED: Final = 512
"""Samples that are read ahead of an engine. Other samplers of the base model take the others."""


def run_sampler(options: SamplerOptions, readiness: Readiness | None = None) -> None:
    """Sample until SIGTERM or SIGINT; then finish the running samples for some seconds."""
    sample_until(options, stop_signals(), readiness)


def sample_until(
    options: SamplerOptions, stop: threading.Event, readiness: Readiness | None = None
) -> None:
    """Sample until `stop` is set; errors as of `run_sampler`."""
    from turnstream_server.operations.samplers import SampleQueue
    from turnstream_server.sampling.loop import SampleLoop

    bases = parse_bases(options.base_model)
    with connect(options.redis_url) as client, ExitStack() as engines:
        loops = [
            SampleLoop(
                engines.enter_context(
                    contextlib.closing(SampleQueue(client, name, sampler=options.sampler))
                ),
                engines.enter_context(_engine(options, path)),
                max_unfinished=_MAX_UNFINISHED * max(1, len(options.forward)),
            )
            for name, path in bases.items()
        ]
        if readiness is not None:
            readiness.reached("base_models")
        logger.info("sampler ready", extra={"sampler": options.sampler, "bases": [*bases]})
        threads = [threading.Thread(target=each.run, args=(stop,)) for each in loops]
        for thread in threads:
            thread.start()
        stop.wait()
        logger.info("sampler stops")
        for thread in threads:
            thread.join()


def _engine(options: SamplerOptions, base: Path) -> Forwarder | Snapshots:
    """Return the engine for a base model: servers if any are named, else an own model."""
    if not options.forward:
        return _own_engine(options, base)
    from turnstream_server.sampling.forwarding import Forwarder

    return Forwarder(
        options.forward,
        shared=options.folder.resolve(),
        max_adapters=options.max_adapters,
        api_key=options.push_api_key,
    )


def _own_engine(options: SamplerOptions, base: Path) -> Snapshots:
    import torch

    from turnstream_server.sampling.snapshots import Snapshots

    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return Snapshots(
        base,
        shared=options.folder,
        max_adapters=options.max_adapters,
        max_models=options.max_models,
        device=device,
        dtype=getattr(torch, dtype),
    )
