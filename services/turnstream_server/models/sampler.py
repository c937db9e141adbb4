"""A sampler for a model in this process: requests from any thread, sampled in one.

with Sampler(model, tokenizer=tokenizer) as sampler:
    future = sampler.submit(prompt_ids, SamplingParams(max_tokens=64))
    result = future.result()        # or: await asyncio.wrap_future(future)
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple, Self

from numpy.typing import ArrayLike
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from turnstream.errors import RejectedError
from turnstream_server.models.continuous_batch import BatchLimits, ContinuousBatch
from turnstream_server.models.sampling_params import SampleResult, SamplingParams
from turnstream_server.models.sampling_requests import (
    ModelLimits,
    SampleRequest,
    limits_of,
    new_request,
)

logger = logging.getLogger(__name__)

_BUSY_RETRY_S: Final = 1.0


class _Update(NamedTuple):
    """New weights, which are loaded between two steps."""

    load: Callable[[], PreTrainedModel]
    version: int
    done: Future[None]


class Sampler:
    """Samples from a model with continuous batching. Closing it cancels unfinished requests.

    Args:
        model: a causal language model in evaluation mode. Its weights change in `update_weights`
            alone; a change at another time mixes old keys and values with new ones.
        tokenizer: for stop strings and texts; None if there are only token ids.
        version: policy version of the weights.
        limits: bounds of the running batch.
        max_requests: unfinished requests. Further ones are refused.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Tokenizer | None = None,
        version: int = -1,
        limits: BatchLimits | None = None,
        max_requests: int = 4096,
    ) -> None:
        limits = limits or BatchLimits()
        self._batch = ContinuousBatch(model, version=version, limits=limits)
        self._model_limits: ModelLimits = limits_of(model, max_tokens=limits.max_cached_tokens)
        self._tokenizer = tokenizer
        self._max_requests = max_requests
        self._num_requests = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[SampleRequest | _Update | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def submit(
        self, prompt_ids: Sequence[int] | ArrayLike, params: SamplingParams | None = None
    ) -> Future[SampleResult]:
        """Return the future of a request; requests start in the order of these calls.

        `future.cancel()` ends a request at any time before its result.

        Raises:
            InvalidConfigError: the prompt or a parameter does not fit to the model.
            RejectedError: the sampler is closed, or has `max_requests` unfinished requests.
        """
        request = new_request(
            prompt_ids,
            params or SamplingParams(),
            limits=self._model_limits,
            tokenizer=self._tokenizer,
        )
        with self._lock:
            if self._num_requests >= self._max_requests:
                message = f"{self._num_requests} requests are unfinished, the most (max_requests)"
                raise RejectedError(message, _BUSY_RETRY_S)
            self._put(request)
            self._num_requests += 1
        request.future.add_done_callback(self._count_down)
        return request.future

    def update_weights(self, version: int, load: Callable[[], PreTrainedModel]) -> None:
        """Call `load` between two steps, and sample from the model that it returns.

        `load` may change the weights of the model in place and return it. Running sequences keep
        their tokens and continue with the new weights: `version_runs` says which version sampled
        which tokens. Blocks until the weights are loaded; an error of `load` is raised here.
        """
        update = _Update(load, version, Future())
        with self._lock:
            self._put(update)
        update.done.result()

    def close(self) -> None:
        """Cancel unfinished requests, and wait for the end of the running step."""
        with self._lock:
            if not self._is_closed:
                self._put(None)
                self._is_closed = True
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, item: SampleRequest | _Update | None) -> None:
        if self._is_closed:
            raise RejectedError("the sampler is closed")
        self._inbox.put(item)

    def _count_down(self, _: Future[SampleResult]) -> None:
        with self._lock:
            self._num_requests -= 1

    def _run(self) -> None:
        """Sample until the sampler is closed. Errors end requests, never this thread."""
        while self._read_inbox():
            try:
                self._batch.step()
            except Exception as error:
                logger.exception("sampling failed; all its requests fail")
                self._batch.end_all(error)
        self._batch.end_all()

    def _read_inbox(self) -> bool:
        """Handle what has arrived, and wait while there is no work; False after `close`."""
        while True:
            try:
                item = self._inbox.get(block=self._batch.is_idle)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, SampleRequest):
                self._batch.add(item)
            else:
                self._update(item)

    def _update(self, update: _Update) -> None:
        """Load weights. After an error the old model restarts too: it may be half changed."""
        try:
            self._batch.restart(update.load(), version=update.version)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._batch.restart(self._batch.model, version=self._batch.version)
            update.done.set_exception(error)
        else:
            update.done.set_result(None)
