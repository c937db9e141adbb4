"""A worker of hosted models as a process, and its metrics."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, cast

import torch
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from turnstream.errors import TurnstreamError
from turnstream.store.client.connection import connect
from turnstream.store.run.batchers import Target, registered_batchers
from turnstream.worker import BatchStream
from turnstream.worker.launch import find_launch
from turnstream.worker.operation_pulls import OperationPuller, PulledOperations
from turnstream_server.engine.host import Host, Lockstep, ReadShares
from turnstream_server.engine.hosted_base import EngineSettings, HostedBase
from turnstream_server.engine.loop import EngineLoop
from turnstream_server.engine.options import EngineOptions
from turnstream_server.engine.run_streams import OpenStream
from turnstream_server.loops import stop_signals
from turnstream_server.models.spec import parse_bases
from turnstream_server.operations.log import Run, num_waiting
from turnstream_server.operations.models import BaseModel
from turnstream_server.telemetry.instruments import Family, collected, sampled
from turnstream_server.telemetry.readiness import Readiness
from turnstream_server.trainer.ranks import Ranks, join_ranks
from turnstream_server.trainer.settings import Layout

logger = logging.getLogger(__name__)

_PULL_S: Final = 30.0
"""Longest wait for the batchers; other models are run before the next attempt."""

_RUN_S: Final = 10.0
"""Longest wait for an answer of a batcher about a run."""

_RUN_BYTES: Final = 128 << 20
"""Prefetched mini-batches of each run on this rank. A larger one is fetched alone."""

_MODELS = GaugeMetricFamily("turnstream_engine_models", "Hosted models of this worker.")
_WAITING = GaugeMetricFamily(
    "turnstream_engine_waiting_commands", "Operations that wait, of all models of this worker."
)

_ANSWER_S: Final = 2.0
_MAX_MODELS: Final = 1_000
"""Models whose waiting operations are counted."""


class EngineMetrics(Collector):
    """Counts the models of a worker, and their operations that wait."""

    def __init__(self, url: str, models: Callable[[], Sequence[str]]) -> None:
        self._client = connect(url, num_retries=0, silent_s=_ANSWER_S)
        self._models = models

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def collect(self) -> Iterator[Family]:
        """Yield each metric that has a value."""
        models = self._models()
        yield sampled(_MODELS, ([], len(models)))
        with contextlib.suppress(TurnstreamError):  # /readyz says that the store is away
            yield sampled(_WAITING, ([], num_waiting(self._client, models[:_MAX_MODELS])))


def shares_from(target: Target, ranks: Ranks) -> ReadShares:
    """Return the reader that pulls the rows of this rank from batchers."""
    puller = OperationPuller(
        target, dp_rank=ranks.rank, dp_world_size=ranks.world_size, timeout_s=_PULL_S
    )

    def read(model_id: str, run: Run, skipped: frozenset[int]) -> list[PulledOperations]:
        return puller.pull(model_id, first=run.first, last=run.last, skipped=skipped)

    return read


def sessions_at(target: Target, ranks: Ranks) -> OpenStream | None:
    """Return a function that begins trainer sessions at batchers; None without any."""
    if not target:
        return None

    def open_stream(run: str, token: str, session: str) -> BatchStream:
        return BatchStream(
            target,
            run,
            ranks.rank,
            ranks.world_size,
            token or None,
            session=session,
            timeout_s=_RUN_S,
            max_prefetch_bytes=_RUN_BYTES,
        )

    return open_stream


def run_engine(
    options: EngineOptions,
    *,
    make_read_shares: Callable[[Target, Ranks], ReadShares] = shares_from,
    readiness: Readiness | None = None,
) -> None:
    """Run the operations of hosted models until SIGTERM or SIGINT comes.

    The process is one of the ranks that torchrun starts; without torchrun it is the only one. The
    running forward pass, or other operation, is finished. All models keep their state.
    """
    stop = stop_signals()
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    target = options.batcher_target or registered_batchers(options.redis_url)
    with join_ranks(find_launch()) as ranks:
        bases = _load_bases(options, ranks)
        host = Host(
            {each.name: each for each in bases},
            read_shares=make_read_shares(target, ranks),
            open_stream=sessions_at(target, ranks),
            ranks=ranks,
        )
        call = Lockstep(host, ranks)
        if readiness is not None:
            readiness.reached("base_models")
        if ranks.is_first:
            _lead(options, bases, call, is_stopping=stop.is_set)
        else:
            call.follow()  # signals are for the first rank
        host.close()


def _lead(
    options: EngineOptions,
    bases: list[HostedBase],
    call: Lockstep,
    *,
    is_stopping: Callable[[], bool],
) -> None:
    served = [_served(each, options) for each in bases]
    names = ", ".join(each.name for each in served)
    logger.info("worker %s serves %s", options.worker, names)
    with connect(options.redis_url) as client:
        loop = EngineLoop(client, served, call=call, options=options)
        metrics = EngineMetrics(options.redis_url, loop.models)
        with contextlib.closing(metrics), collected(metrics):
            loop.run(is_stopping)
    call.stop()
    logger.info("worker %s has stopped", options.worker)


def _load_bases(options: EngineOptions, ranks: Ranks) -> list[HostedBase]:
    is_cuda = ranks.device.startswith("cuda")
    is_lower = options.dtype == "bfloat16" or (options.dtype == "auto" and is_cuda)
    settings = EngineSettings(
        layout=cast(Layout, options.layout),
        dtype=torch.bfloat16 if is_lower else torch.float32,
        device=ranks.device,
        max_rank=options.max_rank,
        full=options.full,
        gradient_checkpointing=options.gradient_checkpointing,
    )
    bases = parse_bases(options.base_model).items()
    return [HostedBase(name, folder, settings=settings, ranks=ranks) for name, folder in bases]


def _served(base: HostedBase, options: EngineOptions) -> BaseModel:
    return BaseModel(
        name=base.name,
        context_length=base.context_length,
        vocab_size=base.vocab_size,
        tokenizer_id=_tokenizer_id(base.name, options),
        max_rank=base.max_rank,
    )


def _tokenizer_id(name: str, options: EngineOptions) -> str:
    """Return the folder of a tokenizer; "" if clients find it by a name such as `org/model`."""
    folder = options.tokenizer or parse_bases(options.base_model)[name]
    is_local = options.tokenizer is not None or "/" not in name
    return str(folder.resolve()) if is_local and (folder / "tokenizer.json").is_file() else ""
