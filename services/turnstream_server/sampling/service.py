"""A sampler process: base models, or inference servers, and a loop for the samples of each.

A loop takes the samples of one base model out of the store, and writes results back into it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable, Set
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from turnstream.errors import InvalidConfigError, RunNotFoundError, UnavailableError
from turnstream.store.client.connection import connect
from turnstream_server.loops import repeat_until, stop_signals
from turnstream_server.models.sampling_params import SampleResult
from turnstream_server.models.spec import parse_bases
from turnstream_server.operations.results import Failure
from turnstream_server.operations.samplers import SampleQueue, SampleRequest
from turnstream_server.sampling.config import SamplerOptions
from turnstream_server.telemetry.instruments import counter, gauge, histogram

if TYPE_CHECKING:
    from turnstream_server.sampling.forwarding import Forwarder
    from turnstream_server.sampling.snapshots import Snapshots
    from turnstream_server.telemetry.readiness import Readiness

logger = logging.getLogger(__name__)

_SAMPLES = counter("turnstream_sampler_samples", "Finished calls of sampling.", ["outcome"])
_SECONDS = histogram(
    "turnstream_sampler_sample_seconds", "Time from the read of a call to its result."
)
_UNFINISHED = gauge(
    "turnstream_sampler_unfinished_samples",
    "Calls of sampling that were read and have no result in the store.",
)

_PAUSE_S: Final = 0.5
"""Pause after a call of the store that failed."""

_CHECK_S: Final = 1.0
"""Time between two searches for samples that were cancelled, or whose session has ended, and whose
notice was missed."""

_LOOK_AHEAD: Final = 64
"""Samples of one read beyond `max_unfinished`."""

_LOOK_AHEAD_BYTES: Final = 64 << 20
"""Most bytes of unfinished prompts at such a read."""

_UNWANTED: Final = Failure("the sample was cancelled, or its session has ended", "user")

_UPKEEP_S: Final = 30.0
"""Time between two searches for the samples of samplers that are gone."""

_GRACE_S: Final = 4.0
"""Time of running samples after a stop. A read may last another second, and a supervisor kills the
process after 5 s."""

_FIELDS: Final = {"prompt_ids": "prompt", "stop_ids": "stop", "stop_strings": "stop"}
"""Names that clients use for fields, where they differ from ours."""


class SampleEngine(Protocol):
    """Something that samples."""

    def submit(self, sample: SampleRequest) -> Future[SampleResult]:
        """Return the future of a sample. Errors are raised, or are those of the future."""
        ...


class _Finished(NamedTuple):
    """A result that is not in the store yet."""

    request_id: str
    result: SampleResult | Failure


class SampleLoop:
    """Reads the samples of a base model, and writes their results.

    No more samples are read while `max_unfinished` have no stored result, unless one session has
    more than half of them: samples of others may wait after its own. `max_ahead` limits these.
    """

    def __init__(
        self,
        samples: SampleQueue,
        engine: SampleEngine,
        *,
        max_unfinished: int = 512,
        max_ahead: int = 4096,
    ) -> None:
        self._samples = samples
        self._engine = engine
        self._max_unfinished = max_unfinished
        self._max_ahead = max_ahead
        self._unfinished: dict[str, list[SampleRequest]] = {}
        """By request id. A request that was queued twice has two entries of the stream."""
        self._futures: dict[str, Future[SampleResult]] = {}
        self._began_s: dict[str, float] = {}
        self._changed = threading.Condition()
        self._finished: queue.SimpleQueue[_Finished | None] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._upkeep_due_s = time.monotonic() + _UPKEEP_S
        self._check_due_s = time.monotonic() + _CHECK_S

    def run(self, stop: threading.Event) -> None:
        """Sample until `stop` is set, and finish running samples for some seconds.

        The next start of this sampler reads the others again. No error of a sample or of the store
        ends the loop.
        """
        writer = threading.Thread(target=self._write_results, name="sample-writer")
        watcher = threading.Thread(target=self._watch, name="sample-watcher")
        writer.start()
        watcher.start()
        try:
            repeat_until(stop, lambda: self._read(stop), what="samples are not read")
            with self._changed:
                self._changed.wait_for(lambda: not self._unfinished, timeout=_GRACE_S)
        finally:
            self._is_over.set()
            self._finished.put(None)
            writer.join()
            watcher.join()

    def _read(self, stop: threading.Event) -> None:
        """Submit what the queue has, unless too many samples are unfinished."""
        with self._changed:
            has_space = self._changed.wait_for(lambda: self._space() > 0, timeout=_PAUSE_S)
        if time.monotonic() >= self._check_due_s:
            self._check_due_s = time.monotonic() + _CHECK_S
            self._drop(self._samples.unwanted(self._running()))
        if time.monotonic() >= self._upkeep_due_s:
            self._upkeep_due_s = time.monotonic() + _UPKEEP_S
            self._samples.renew(self._running())
            if self._space() > 0:
                self._accept(self._samples.take_over(), stop)
        count = self._space() if has_space else self._num_ahead()
        if count > 0:
            # The first read after a restart returns all that this sampler had not finished.
            self._accept(self._samples.read(count=count, block=has_space), stop)

    def _watch(self) -> None:
        """Drop samples as soon as the store has a notice of their end; a step has no cost of it."""

        def drop_ended() -> None:
            if named := self._named(self._samples.ended()):
                self._drop(self._samples.unwanted(named))

        repeat_until(self._is_over, drop_ended, what="the ends of samples are not read")

    def _named(self, ids: Set[str]) -> list[SampleRequest]:
        requests = {each for each in ids if each in self._futures}
        sessions = {each for each in ids if ":" not in each}
        if not requests and not sessions:
            return []
        return [
            each
            for each in self._running()
            if str(each.request_id) in requests or each.session_id in sessions
        ]

    def _running(self) -> list[SampleRequest]:
        with self._changed:
            return [each for entries in self._unfinished.values() for each in entries]

    def _space(self) -> int:
        return self._max_unfinished - len(self._unfinished)

    def _num_ahead(self) -> int:
        """Return the number of samples to read beyond `max_unfinished`."""
        running = self._running()
        num_bytes = sum(each.prompt.nbytes for each in running)
        by_session = Counter(each.session_id for each in running)
        is_crowded = max(by_session.values(), default=0) > self._max_unfinished // 2
        if not is_crowded or num_bytes > _LOOK_AHEAD_BYTES:
            return 0
        return min(_LOOK_AHEAD, self._max_ahead - len(running))

    def _accept(self, samples: Iterable[SampleRequest], stop: threading.Event) -> None:
        """Submit samples; after a stop the next start reads them again."""
        found = [*samples]
        unwanted = {str(each.request_id) for each in self._samples.unwanted(found)}
        for sample in found:
            if stop.is_set() or not self._is_new(sample):
                continue
            if str(sample.request_id) in unwanted:
                self._finished.put(_Finished(str(sample.request_id), _UNWANTED))
            else:
                self._submit(sample)

    def _drop(self, samples: Iterable[SampleRequest]) -> None:
        for request_id in {str(each.request_id) for each in samples}:
            if (future := self._futures.pop(request_id, None)) is not None and future.cancel():
                self._finished.put(_Finished(request_id, _UNWANTED))

    def _is_new(self, sample: SampleRequest) -> bool:
        """Return whether a request does not run already; record its entry in any case."""
        with self._changed:
            if str(sample.request_id) not in self._unfinished:
                self._began_s[str(sample.request_id)] = time.monotonic()
                _UNFINISHED.inc()
            entries = self._unfinished.setdefault(str(sample.request_id), [])
            is_new = not entries
            if all(each.entry != sample.entry for each in entries):
                entries.append(sample)
        return is_new

    def _submit(self, sample: SampleRequest) -> None:
        request_id = str(sample.request_id)
        try:
            future = self._engine.submit(sample)
        except Exception as error:  # noqa: BLE001 - one bad request is its own failure
            self._finished.put(_Finished(request_id, failure_of(error)))
        else:
            self._futures[request_id] = future
            future.add_done_callback(functools.partial(self._on_done, request_id))

    def _on_done(self, request_id: str, future: Future[SampleResult]) -> None:
        if future.cancelled():  # dropped, or the engine is closed: then a later start samples
            return
        self._futures.pop(request_id, None)
        error = future.exception()
        self._finished.put(
            _Finished(request_id, future.result() if error is None else failure_of(error))
        )

    def _write_results(self) -> None:
        while (finished := self._finished.get()) is not None:
            while not self._is_over.is_set() and not self._is_written(finished):
                self._is_over.wait(_PAUSE_S)

    def _is_written(self, finished: _Finished) -> bool:
        """Write a result for every entry of its request; return whether the store has it."""
        with self._changed:
            entries = [*self._unfinished.get(finished.request_id, ())]
        try:
            for sample in entries:
                self._samples.finish(sample, finished.result)
        except UnavailableError as error:
            logger.warning("results of samples: %s", error)
            return False
        except Exception:  # a take-over reads the sample again
            logger.exception("the result of %s was not written", finished.request_id)
        with self._changed:
            if self._unfinished.pop(finished.request_id, None) is not None:
                _UNFINISHED.dec()
                _SECONDS.observe(time.monotonic() - self._began_s.pop(finished.request_id))
                is_failed = isinstance(finished.result, Failure)
                _SAMPLES.labels("failed" if is_failed else "done").inc()
            self._changed.notify_all()
        return True


def failure_of(error: BaseException) -> Failure:
    """Return the failure of a sample.

    >>> failure_of(InvalidConfigError("stop_ids", "7 is not below 5"))
    Failure(error='stop: 7 is not below 5', category='user')
    """
    if isinstance(error, InvalidConfigError):
        return Failure(f"{_FIELDS.get(error.field, error.field)}: {error.message}", "user")
    if isinstance(error, RunNotFoundError):
        return Failure(str(error), "user")
    logger.warning("a sample failed: %r", error)
    return Failure(f"{type(error).__name__}: {error}", "server")


__all__ = ["SamplerOptions", "run_sampler", "sample_until"]


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
    from turnstream_server.sampling.service import SampleLoop

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
