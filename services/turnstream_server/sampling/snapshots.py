"""The snapshots of one base model in this process: adapters on it, and whole models."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from turnstream.errors import InvalidConfigError, RejectedError, TurnstreamError
from turnstream_server.models.adapters import Adapters
from turnstream_server.models.fair_turns import Share
from turnstream_server.models.folders import SnapshotFolder, find_snapshot, snapshot_gone
from turnstream_server.models.policy import load_policy
from turnstream_server.models.sampler import Sampler
from turnstream_server.models.sampling_params import SampleResult
from turnstream_server.operations.samplers import SampleRequest

_LOADING: Final = threading.Lock()
"""Held while weights load. Transformers and peft change global state of torch as they do."""

_TOKENIZER_FILE: Final = "tokenizer.json"
_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_VERSION: Final = 0
"""Policy version of all tokens: snapshots do not change."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Loaded:
    """A snapshot that is loaded; `adapter` is its name in the sampler, "" for a whole model."""

    sampler: Sampler
    adapter: str
    unload: Callable[[], None]
    num_unfinished: int = 0

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter, and no whole model."""
        return self.adapter != ""


class Snapshots:
    """Samples from a base model, and from the snapshots that samples name.

    One thread loads a snapshot when a sample needs it. Samples of other snapshots run at the same
    time. A new snapshot replaces the one that was used least recently and has no unfinished sample.
    Closing cancels unfinished samples.

    Args:
        base: folder of the base model, with its `tokenizer.json` for stop strings.
        shared: folder below which snapshots are.
        max_adapters: adapters that are loaded at one time.
        max_models: whole models that are loaded at one time, in addition to the base model.
        max_requests: unfinished samples.
        device: device of the weights.
        dtype: type of the weights; those of adapters are float32.
    """

    def __init__(
        self,
        base: Path,
        *,
        shared: Path,
        max_adapters: int = 16,
        max_models: int = 2,
        max_requests: int = 4096,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._shared = shared
        self._max_adapters = max_adapters
        self._max_models = max_models
        self._max_requests = max_requests
        self._load_policy = functools.partial(load_policy, device=device, dtype=dtype)
        file = base / _TOKENIZER_FILE
        self._tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None
        with _LOADING:
            self._model = self._load_policy(base)
        self._adapters = Adapters(self._model, base)
        self._base = self._new_sampler(self._model, adapters=self._adapters)
        self._loaded: OrderedDict[SnapshotFolder, _Loaded] = OrderedDict()
        self._changed = threading.Condition()  # reentrant: a finished future calls back at once
        self._is_closed = False
        self._numbers = itertools.count(1)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="snapshot-loader")

    def submit(self, sample: SampleRequest) -> Future[SampleResult]:
        """Return the future of a sample; InvalidConfigError if it does not fit the model."""
        strings = sample.params.stop_strings
        if strings and self._tokenizer is None:
            message = f"{strings[0]!r} needs a {_TOKENIZER_FILE} in the folder of the base model"
            raise InvalidConfigError("stop", message)
        if sample.folder is None:
            return self._base.submit(sample.prompt, sample.params, share=_share(sample))
        snapshot = find_snapshot(self._shared, sample.folder)
        with self._changed:
            if snapshot in self._loaded:
                return self._start(snapshot, sample)
        result: Future[SampleResult] = Future()
        self._loader.submit(self._load_and_start, snapshot, sample, result)
        return result

    @property
    def num_loaded(self) -> int:
        """Return the number of loaded snapshots, without the base model."""
        return len(self._loaded)

    def close(self) -> None:
        """Cancel unfinished samples, and release the models."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._loader.shutdown(cancel_futures=True)
        for each in {self._base, *(loaded.sampler for loaded in self._loaded.values())}:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, snapshot: SnapshotFolder, sample: SampleRequest) -> Future[SampleResult]:
        """Submit a sample of a loaded snapshot; the caller holds the lock."""
        self._loaded.move_to_end(snapshot)
        loaded = self._loaded[snapshot]
        future = loaded.sampler.submit(
            sample.prompt, sample.params, adapter=loaded.adapter, share=_share(sample)
        )
        loaded.num_unfinished += 1
        future.add_done_callback(functools.partial(self._on_done, loaded))
        return future

    def _on_done(self, loaded: _Loaded, _: Future[SampleResult]) -> None:
        with self._changed:
            loaded.num_unfinished -= 1
            self._changed.notify_all()

    # In the loader thread.

    def _load_and_start(
        self, snapshot: SnapshotFolder, sample: SampleRequest, result: Future[SampleResult]
    ) -> None:
        if result.cancelled():
            return
        try:
            if snapshot not in self._loaded:
                self._load(snapshot)
            with self._changed:
                started = self._start(snapshot, sample)
        except Exception as error:  # noqa: BLE001 - raised where the result is waited for
            if result.set_running_or_notify_cancel():
                result.set_exception(error)
        else:
            started.add_done_callback(functools.partial(_copy, result))
            result.add_done_callback(functools.partial(_cancel, started))

    def _load(self, snapshot: SnapshotFolder) -> None:
        is_adapter = snapshot.is_adapter
        self._unload_others(is_adapter=is_adapter)
        load = self._load_adapter if is_adapter else self._load_model
        try:
            with _LOADING:
                loaded = load(snapshot.path)
        except Exception as error:
            if not snapshot.path.is_dir():
                raise snapshot_gone(snapshot.path.relative_to(self._shared)) from error
            raise TurnstreamError(f"{snapshot.path} does not load: {error}") from error
        with self._changed:
            self._loaded[snapshot] = loaded

    def _unload_others(self, *, is_adapter: bool) -> None:
        """Unload snapshots until one more may be loaded; wait while all have unfinished samples."""
        most = self._max_adapters if is_adapter else self._max_models
        while True:
            with self._changed:
                own = {k: each for k, each in self._loaded.items() if each.is_adapter == is_adapter}
                if len(own) < most:
                    return
                if self._is_closed:
                    raise RejectedError("the sampler is closed")
                idle = next((k for k, each in own.items() if not each.num_unfinished), None)
                if idle is None:
                    self._changed.wait()
                    continue
                unloaded = self._loaded.pop(idle)
            unloaded.unload()

    def _load_adapter(self, path: Path) -> _Loaded:
        """Add an adapter between two steps of the base model's sampler."""
        name = f"snapshot-{next(self._numbers)}"
        # Into the cache of the system: the second read is between two steps, and delays them.
        (path / _ADAPTER_WEIGHTS).read_bytes()

        def load() -> PreTrainedModel:
            try:
                self._adapters.load(name, path)
            except Exception:
                self._adapters.remove(name)  # without its weights
                raise
            return self._model

        self._base.update_weights(_VERSION, load, adapter=name)
        unload = functools.partial(self._base.remove_adapter, name)
        return _Loaded(sampler=self._base, adapter=name, unload=unload)

    def _load_model(self, path: Path) -> _Loaded:
        sampler = self._new_sampler(self._load_policy(path))
        return _Loaded(sampler=sampler, adapter="", unload=sampler.close)

    def _new_sampler(self, model: PreTrainedModel, *, adapters: Adapters | None = None) -> Sampler:
        return Sampler(
            model,
            adapters=adapters,
            tokenizer=self._tokenizer,
            version=_VERSION,
            max_requests=self._max_requests,
        )


def _share(sample: SampleRequest) -> Share:
    return Share(sample.owner, sample.session_id)


def _cancel(started: Future[SampleResult], result: Future[SampleResult]) -> None:
    if result.cancelled():
        started.cancel()


def _copy(result: Future[SampleResult], source: Future[SampleResult]) -> None:
    """Complete `result` as `source` was, unless it is cancelled."""
    if source.cancelled():
        result.cancel()
    elif not result.set_running_or_notify_cancel():
        pass
    elif (error := source.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(source.result())
