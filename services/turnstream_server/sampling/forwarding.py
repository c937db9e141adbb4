"""Samples from inference servers that speak the API of OpenAI: vLLM and SGLang.

A server has the base model. The adapter of a snapshot is loaded by its path when a sample needs it.
The server must see the shared folder at the same path. The requests are those of vLLM 0.33.0 and
SGLang 0.5.23.
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
from typing import Any, Final, NamedTuple, Self

import httpx2
import numpy as np

from turnstream.errors import InvalidConfigError, RejectedError, TurnstreamError, UnavailableError
from turnstream.responses import from_openai
from turnstream_server.models.folders import SnapshotFolder, find_snapshot, snapshot_gone
from turnstream_server.models.sampling_params import (
    SampledSequence,
    SampleResult,
    SamplingParams,
    StopReason,
    TopkLogprobs,
)
from turnstream_server.operations.samplers import SampleRequest
from turnstream_server.sampling.config import parse_forward

logger = logging.getLogger(__name__)

_VERSION: Final = 0
_REASONS: Final = {"stop": StopReason.STOP, "length": StopReason.LENGTH}


class ServedModel(NamedTuple):
    """The base model of a server: its name there, and the most tokens of a row."""

    name: str
    max_length: int


def require_supported(sample: SampleRequest, *, kind: str) -> None:
    """Raise InvalidConfigError for a field of the sample that a kind of server does not support."""
    params = sample.params
    if not sample.prompt.size:
        raise InvalidConfigError("prompt", "it is empty: one token or more is needed")
    refused: dict[str, str] = {}
    if kind == "vllm":
        if params.temperature:
            reason = "vLLM narrows its log-probabilities by it"
            refused |= dict.fromkeys(("top_k", "top_p"), reason)
        if params.logprob_temperature != 1.0:
            reason = f"vLLM computes it at temperature 1, not {params.temperature}"
            refused |= dict.fromkeys(("prompt_logprobs", "topk_prompt_logprobs"), reason)
    else:
        for name in ("prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs"):
            refused[name] = "completions of SGLang have none"
    defaults = SamplingParams()
    for name, reason in refused.items():
        if (value := getattr(params, name)) != getattr(defaults, name):
            raise InvalidConfigError(name, f"{value} is not supported: {reason}")


def completion_requests(
    sample: SampleRequest, *, kind: str, model: ServedModel, adapter: str
) -> list[dict[str, Any]]:
    """Return the bodies of the requests for a sample: one, or one for each seeded sequence.

    Servers differ in the seeds of the sequences of one request. InvalidConfigError for a row that
    is longer than the server's longest.
    """
    params = sample.params
    body = {
        "prompt": sample.prompt.tolist(),
        "max_tokens": _max_tokens(sample, model),
        "n": params.num_samples,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        # Else vLLM takes the values of the model's generation_config.json.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop": list(params.stop_strings),
        "stop_token_ids": list(params.stop_ids or ()),
        "ignore_eos": params.stop_ids is not None,
        "skip_special_tokens": False,
        "logprobs": max(1, params.topk_sample_logprobs),
        "return_token_ids": True,
    }
    if kind == "vllm":
        body |= {"model": adapter or model.name, "return_tokens_as_token_ids": True}
        if params.prompt_logprobs or params.topk_prompt_logprobs:
            body["prompt_logprobs"] = params.topk_prompt_logprobs
    else:
        body |= {"model": model.name, "no_stop_trim": True}
        if adapter:
            body["lora_path"] = adapter
    if params.seed is None:
        return [body]
    seeds = np.random.SeedSequence(params.seed % 2**64).generate_state(params.num_samples)
    return [{**body, "n": 1, "seed": seed} for seed in (seeds >> 1).tolist()]


def result_of(sample: SampleRequest, answers: Sequence[Mapping[str, Any]]) -> SampleResult:
    """Return the result out of the answers; UnavailableError if a sequence was ended early."""
    params = sample.params
    sequences = [
        _sequence(sample, answer, index)
        for answer in answers
        for index in range(len(answer["choices"]))
    ]
    scores = answers[0]["choices"][0].get("prompt_logprobs") or []
    by_id = [None if each is None else _by_id(each) for each in scores]
    logprobs = None
    if params.prompt_logprobs:
        pairs = zip(by_id, sample.prompt.tolist(), strict=True)
        values = [np.nan if each is None else each[token] for each, token in pairs]
        logprobs = np.array(values, np.float32)
    return SampleResult(
        sequences=tuple(sequences),
        prompt_logprobs=logprobs,
        topk_prompt_logprobs=_topk(by_id, params.topk_prompt_logprobs),
        prompt_version=_VERSION,
    )


def _max_tokens(sample: SampleRequest, model: ServedModel) -> int:
    space = model.max_length - sample.prompt.size
    wanted = sample.params.max_tokens
    if space < max(1, wanted or 1):
        message = f"{sample.prompt.size} prompt tokens and {wanted or 1} to sample"
        raise InvalidConfigError(
            "max_tokens", f"{message} are more than the context of {model.max_length}"
        )
    return wanted or space


def _sequence(sample: SampleRequest, answer: Mapping[str, Any], index: int) -> SampledSequence:
    choice = answer["choices"][index]
    if (reason := choice.get("finish_reason")) not in _REASONS:
        raise UnavailableError(f"the server ended a sequence with finish_reason {reason!r}")
    turn = from_openai(choice, prompt_ids=sample.prompt)
    num_topk = sample.params.topk_sample_logprobs
    top = choice["logprobs"]["top_logprobs"] if num_topk else []
    by_id = [
        {int(name.removeprefix("token_id:")): value for name, value in each.items()} for each in top
    ]
    return SampledSequence(
        token_ids=np.array(turn["response_ids"], np.int32),
        logprobs=np.array(turn["logprobs"], np.float32),
        stop_reason=_REASONS[reason],
        version_runs=((_VERSION, len(turn["response_ids"])),),
        topk=_topk(by_id, num_topk),
    )


def _by_id(scores: Mapping[str, Mapping[str, Any]]) -> dict[int, float]:
    return {int(token): score["logprob"] for token, score in scores.items()}


def _topk(by_id: Sequence[Mapping[int, float] | None], count: int) -> TopkLogprobs | None:
    """Return the `count` most likely tokens of each position; a position without any has NaN."""
    if not count:
        return None
    rows = [
        [(0, np.nan)] * count
        if each is None
        else sorted(each.items(), key=lambda item: -item[1])[:count]
        for each in by_id
    ]
    pairs = np.array(rows, np.float64).reshape(len(rows), count, 2)
    return TopkLogprobs(pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.float32))


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
