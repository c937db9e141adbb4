"""Samples from inference servers that speak the API of OpenAI: vLLM and SGLang.

A server has the base model. The adapter of a snapshot is loaded by its path when a sample needs it.
The server must see the shared folder at the same path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Self

import httpx2

from turnstream.errors import InvalidConfigError, RejectedError, TurnstreamError, UnavailableError
from turnstream_server.models.sampling_params import SampleResult
from turnstream_server.operations.samplers import SampleRequest
from turnstream_server.sampling.completions import (
    ServedModel,
    completion_requests,
    require_supported,
    result_of,
)
from turnstream_server.sampling.config import parse_forward
from turnstream_server.sampling.folders import SnapshotFolder, find_snapshot, snapshot_gone

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 6
_PAUSE_S: Final = 0.5
"""Pause after the first failed attempt; each further one is twice as long."""

_TIMEOUT: Final = httpx2.Timeout(3600.0, connect=10.0)
"""A request may wait long for its turn on a busy server."""

_INVALID: Final = (400, 422)
_TRANSIENT: Final = (408, 425, 429, 500, 502, 503, 504)
_SHOWN_CHARACTERS: Final = 300


class Forwarder:
    """Samples from the least busy of several servers of one base model (`vllm=URL`, `sglang=URL`).

    Each server has `max_adapters` at one time. An `api_key` is sent as bearer token.
    """

    def __init__(
        self, targets: Sequence[str], *, shared: Path, max_adapters: int = 16, api_key: str = ""
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx2.AsyncClient(
            headers=headers, timeout=_TIMEOUT, limits=httpx2.Limits(max_connections=None)
        )
        self._servers = [
            _Server(self._client, *parse_forward(each), max_adapters=max_adapters)
            for each in targets
        ]
        self._shared = shared
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forwarder")
        self._thread.start()

    def submit(self, sample: SampleRequest) -> Future[SampleResult]:
        """Return the future of a sample; InvalidConfigError for a field that is not supported."""
        for server in self._servers:
            require_supported(sample, kind=server.kind)
        snapshot = None if sample.folder is None else find_snapshot(self._shared, sample.folder)
        if snapshot is not None and not snapshot.is_adapter:
            message = f"{sample.folder} is a whole model, and the servers load adapters alone"
            raise InvalidConfigError("model_path", message)
        return asyncio.run_coroutine_threadsafe(self._sample(sample, snapshot), self._loop)

    def close(self) -> None:
        """Cancel unfinished samples."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _sample(self, sample: SampleRequest, snapshot: SnapshotFolder | None) -> SampleResult:
        """Sample on the least busy server; after a failure of it, on the one that is so then."""
        for attempt in range(_ATTEMPTS):
            server = min(self._servers, key=lambda each: each.num_unfinished)
            try:
                return await server.sample(sample, snapshot)
            except UnavailableError as error:
                if attempt == _ATTEMPTS - 1:
                    raise
                logger.warning("%s", error)
            await asyncio.sleep(_PAUSE_S * 2**attempt)
        raise AssertionError


class _Server:
    """One server; all calls are of one event loop."""

    def __init__(
        self, client: httpx2.AsyncClient, kind: str, url: str, *, max_adapters: int
    ) -> None:
        self.kind = kind
        self.num_unfinished = 0
        self._client = client
        self._url = url
        self._route = "/v1/" if kind == "vllm" else "/"
        self._max_adapters = max_adapters
        self._adapters: OrderedDict[str, asyncio.Task[None]] = OrderedDict()
        self._uses: Counter[str] = Counter()
        self._model: ServedModel | None = None

    async def sample(self, sample: SampleRequest, snapshot: SnapshotFolder | None) -> SampleResult:
        name = "" if snapshot is None else adapter_name(sample, snapshot)
        self.num_unfinished += 1
        self._uses[name] += 1
        try:
            if snapshot is not None:
                await self._ready(name, snapshot)
            model = self._model = self._model or await self._served_model()
            bodies = completion_requests(sample, kind=self.kind, model=model, adapter=name)
            answers = await asyncio.gather(*(self._complete(body, name) for body in bodies))
            return result_of(sample, answers)
        finally:
            self.num_unfinished -= 1
            self._uses -= Counter([name])  # without the names that have no use

    async def _complete(self, body: Mapping[str, Any], adapter: str) -> dict[str, Any]:
        try:
            return (await self._call("POST", "/v1/completions", json=body)).json()
        except (RejectedError, InvalidConfigError) as error:
            if adapter and adapter in str(error):  # the server has restarted or unloaded it
                self._adapters.pop(adapter, None)
                raise UnavailableError(str(error)) from error
            raise

    async def _ready(self, name: str, snapshot: SnapshotFolder) -> None:
        """Return once the server has an adapter; unload those that were used least recently."""
        if name not in self._adapters:
            self._adapters[name] = asyncio.create_task(self._load(name, snapshot.path))
        self._adapters.move_to_end(name)
        try:
            await asyncio.shield(self._adapters[name])
        except TurnstreamError as error:
            self._adapters.pop(name, None)
            if not snapshot.path.is_dir():
                raise snapshot_gone(snapshot.path) from error
            if isinstance(error, UnavailableError):
                raise
            raise TurnstreamError(f"{snapshot.path} does not load: {error}") from error
        while len(self._adapters) > self._max_adapters:
            idle = next((each for each in self._adapters if not self._uses[each]), None)
            if idle is None:
                break
            del self._adapters[idle]
            with contextlib.suppress(TurnstreamError):
                await self._change("unload", {"lora_name": idle})

    async def _load(self, name: str, path: Path) -> None:
        content = {"lora_name": name, "lora_path": str(path)}
        if self.kind == "vllm":
            await self._change("load", {**content, "load_inplace": True})
            return
        with contextlib.suppress(InvalidConfigError):  # an earlier sampler may have loaded it
            await self._change("unload", {"lora_name": name})
        await self._change("load", content)

    async def _change(self, verb: str, content: Mapping[str, Any]) -> None:
        await self._call("POST", f"{self._route}{verb}_lora_adapter", json=content)

    async def _served_model(self) -> ServedModel:
        cards = (await self._call("GET", "/v1/models")).json()["data"]
        card = next(each for each in cards if each.get("parent") is None)
        return ServedModel(card["id"], card["max_model_len"])

    async def _call(self, method: str, path: str, **content: Any) -> httpx2.Response:
        try:
            response = await self._client.request(method, f"{self._url}{path}", **content)
        except httpx2.HTTPError as error:
            message = f"{self._url}{path}: {type(error).__name__}: {error}"
            raise UnavailableError(message) from error
        if response.is_success:
            return response
        text = response.text[:_SHOWN_CHARACTERS]
        message = f"{self._url}{path}: HTTP {response.status_code}: {text}"
        if response.status_code in _INVALID:
            raise InvalidConfigError("sampling_params", message)
        kind = UnavailableError if response.status_code in _TRANSIENT else RejectedError
        raise kind(message)


def adapter_name(sample: SampleRequest, snapshot: SnapshotFolder) -> str:
    """Return the name of a snapshot on servers; one that replaces its folder has another name."""
    return f"{sample.folder}@{snapshot.modified_ns}"
