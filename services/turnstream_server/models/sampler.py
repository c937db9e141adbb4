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
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from numpy.typing import ArrayLike
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from turnstream.errors import InvalidConfigError, RejectedError
from turnstream_server.models.continuous_batch import ContinuousBatch
from turnstream_server.models.fair_turns import ANYONE, BatchLimits, Share
from turnstream_server.models.sampling_params import SampleResult, SamplingParams
from turnstream_server.models.sampling_requests import (
    ModelLimits,
    SampleRequest,
    limits_of,
    new_request,
)

if TYPE_CHECKING:
    from turnstream_server.models.adapters import Adapters

logger = logging.getLogger(__name__)

_BUSY_RETRY_S: Final = 1.0


class _Change(NamedTuple):
    """A change of weights between two steps."""

    apply: Callable[[], None]
    done: Future[None]


class Sampler:
    """Samples from a model with continuous batching. Closing it cancels unfinished requests.

    Args:
        model: a causal language model in evaluation mode. Its weights change in `update_weights`
            alone; a change at another time mixes old keys and values with new ones.
        adapters: adapters of the model, which requests may name. No other thread may use the model.
            Requests without an adapter sample from the base model. None: from the model as it is.
        tokenizer: for stop strings and texts; None if there are only token ids.
        version: policy version of the weights.
        limits: bounds of the running batch.
        max_requests: unfinished requests. Further ones are refused.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        adapters: Adapters | None = None,
        tokenizer: Tokenizer | None = None,
        version: int = -1,
        limits: BatchLimits | None = None,
        max_requests: int = 4096,
    ) -> None:
        limits = limits or BatchLimits()
        self._batch = ContinuousBatch(model, version=version, limits=limits, adapters=adapters)
        self._adapters = adapters
        self._names = {""}
        self._model_limits: ModelLimits = limits_of(model, max_tokens=limits.max_cached_tokens)
        self._tokenizer = tokenizer
        self._max_requests = max_requests
        self._num_requests = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[SampleRequest | _Change | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt_ids: Sequence[int] | ArrayLike,
        params: SamplingParams | None = None,
        *,
        adapter: str = "",
        share: Share = ANYONE,
    ) -> Future[SampleResult]:
        """Return the future of a request; those of a share start in the order of these calls.

        `future.cancel()` ends a request at any time before its result. `adapter` names the adapter
        that samples; "" is the model itself. Tokens are divided equally among shares with waiting
        requests.

        Raises:
            InvalidConfigError: prompt, parameters or adapter do not fit the model.
            RejectedError: the sampler is closed, or has `max_requests` unfinished requests.
        """
        request = new_request(
            prompt_ids,
            params or SamplingParams(),
            limits=self._model_limits,
            tokenizer=self._tokenizer,
            adapter=adapter,
            share=share,
        )
        with self._lock:
            if adapter not in self._names:
                message = f"{adapter!r} was not added: use update_weights(adapter=...)"
                raise InvalidConfigError("adapter", message)
            if self._num_requests >= self._max_requests:
                message = f"{self._num_requests} requests are unfinished, the most (max_requests)"
                raise RejectedError(message, _BUSY_RETRY_S)
            self._put(request)
            self._num_requests += 1
        request.future.add_done_callback(self._count_down)
        return request.future

    def update_weights(
        self, version: int, load: Callable[[], PreTrainedModel], *, adapter: str = ""
    ) -> None:
        """Call `load` between two steps, and sample from the model that it returns.

        `load` may change the weights of the model in place and return it. With a new `adapter`,
        it adds this one to `adapters` and returns the model. Running sequences keep their tokens
        and continue with the new weights: `version_runs` says which version sampled which tokens.
        Sequences of other adapters are not disturbed; new weights of the model itself change all.
        Blocks until the weights are loaded; an error of `load` is raised here.
        """
        if adapter and self._adapters is None:
            raise InvalidConfigError("adapter", f"{adapter!r}, but the sampler has no adapters")
        self._change(lambda: self._update(version, load, adapter=adapter))

    def remove_adapter(self, adapter: str) -> None:
        """Delete an adapter between two steps. Its unfinished requests fail with RejectedError."""
        with self._lock:
            if not adapter or adapter not in self._names:
                raise InvalidConfigError("adapter", f"{adapter!r} was not added")
            self._names.remove(adapter)
        self._change(lambda: self._remove(adapter))

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

    def _change(self, apply: Callable[[], None]) -> None:
        change = _Change(apply, Future())
        with self._lock:
            self._put(change)
        change.done.result()

    def _put(self, item: SampleRequest | _Change | None) -> None:
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
                continue
            try:
                item.apply()
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                item.done.set_exception(error)
            else:
                item.done.set_result(None)

    def _update(self, version: int, load: Callable[[], PreTrainedModel], *, adapter: str) -> None:
        """Load weights. After an error the old ones restart too: they may be half changed."""
        try:
            self._batch.restart(load(), version=version, adapter=adapter)
        except Exception:
            if self._batch.has(adapter):
                old = self._batch.version(adapter)
                self._batch.restart(self._batch.model, version=old, adapter=adapter)
            raise
        with self._lock:
            self._names.add(adapter)

    def _remove(self, adapter: str) -> None:
        assert self._adapters is not None
        with self._lock:
            self._names.discard(adapter)  # an update at the same time may have added it again
        self._batch.remove(adapter)
        self._adapters.remove(adapter)
