"""Hosted models as engines: a call becomes a sample operation, and its result an answer of vLLM.

`hosted=NAME` samples from a base model, `hosted=MODEL_ID/sampler_weights/NAME` from saved weights.
The version of an answer is the name of the saved weights, such as `v7`, and 0 for a base model.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from turnstream.errors import (
    BatchingError,
    EndOfRunError,
    InvalidConfigError,
    RunNotFoundError,
    TurnstreamError,
    UnavailableError,
)
from turnstream.types.names import quoted
from turnstream_server.gateway.limits import check_sampling_limits
from turnstream_server.gateway.polls import DroppedResultError, UnknownRequestError
from turnstream_server.gateway.proxy.answers import EngineRefusalError, FailedEngineError
from turnstream_server.gateway.proxy.engines import Engines
from turnstream_server.gateway.proxy.rendering import ModelTokenizer
from turnstream_server.gateway.proxy.requests import Route
from turnstream_server.gateway.state import Gateway
from turnstream_server.gateway.tinker.sample_calls import Sampling
from turnstream_server.loops import background, repeat
from turnstream_server.models.sampling_params import SampledSequence, SampleResult, SamplingParams
from turnstream_server.operations.checkpoints import CheckpointPath, folder_of, read_checkpoint
from turnstream_server.operations.keys import RequestId
from turnstream_server.operations.models import BaseModel, read_model_async
from turnstream_server.operations.results import Failure, decode_result, keep_fetched
from turnstream_server.operations.samplers import (
    SamplerRecord,
    cancel_sample,
    submit_sample,
    write_sampler_async,
)
from turnstream_server.operations.sessions import (
    Session,
    add_member,
    beat,
    finish_session,
    open_session,
)

logger = logging.getLogger(__name__)

_SAVED: Final = "sampler_weights"
_CALLS_OF_SESSION: Final = 1_000
"""Calls of one sampling session. Its small results stay in the store until it ends."""

_BEAT_S: Final = 20.0
_MAX_TOKENS: Final = 16
"""Tokens of a completion that names no number, as of the OpenAI API."""

_UNSUPPORTED: Final = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Options that hosted models do not have, with the values that change nothing."""

_Value = TypeVar("_Value")


class _Weights(NamedTuple):
    """Weights to sample from; `label` is their version."""

    base: BaseModel
    owner: str
    label: str
    path: CheckpointPath | None = None


class _OpenSession:
    """A sampling session of one model, with the numbers of its calls."""

    def __init__(self, record: SamplerRecord) -> None:
        self.record = record
        self.num_calls = 0
        self.num_running = 0

    @property
    def session_id(self) -> str:
        return self.record.sampler_id.partition(":")[0]


class HostedSampler:
    """Answers calls with samples of hosted models, as samplers of this store compute them."""

    def __init__(self, gateway: Gateway, *, timeout_s: float) -> None:
        self._gateway = gateway
        self._timeout_s = timeout_s
        self._opening = asyncio.Lock()
        self._current: dict[str, _OpenSession] = {}
        self._sessions: list[_OpenSession] = []
        self._tokenizers: dict[str, ModelTokenizer] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        """A tokenizer of transformers is for one thread at a time."""
        self._exit = contextlib.AsyncExitStack()
        self._is_beating = False
        self._cancelling: set[asyncio.Task[None]] = set()

    async def complete(
        self, model: str, body: Mapping[str, Any], *, route: Route
    ) -> Mapping[str, Any]:
        """Return the answer to a call, in the shape of vLLM; errors as of `Engines.call`."""
        try:
            weights = await self._weights(model)
            _check_model(body, {model, weights.base.name})
            tokenizer = await self._tokenizer(weights.base)
            prompt = await self._in_thread(lambda: tokenizer.prompt(body, route=route))
            params = params_of(body, route=route, end_id=tokenizer.end_id)
            sampling = Sampling(np.array(prompt, np.int32), params)
            check_sampling_limits(sampling, weights.base)
        except InvalidConfigError as error:
            if error.field.startswith("--"):
                raise FailedEngineError(str(error)) from error
            raise _refusal(str(error), field=error.field) from error
        except BatchingError as error:
            raise _refusal(str(error)) from error
        except RunNotFoundError as error:
            raise FailedEngineError(f"hosted={model}: {error}") from error
        result = await self._sampled(model, weights, sampling)
        answer = functools.partial(
            answer_of, result, body, prompt, tokenizer=tokenizer, route=route, label=weights.label
        )
        return await self._in_thread(answer)

    async def cards(self, model: str) -> list[dict[str, Any]]:
        """Return the card of the model, as `/v1/models` has it."""
        base = (await self._weights(model)).base
        parent = None if base.name == model else base.name
        card = {"id": model, "object": "model", "created": 0, "owned_by": "turnstream"}
        return [{**card, "parent": parent, "max_model_len": base.context_length}]

    async def close(self) -> None:
        """End the sampling sessions."""
        await self._exit.aclose()
        await asyncio.gather(*self._cancelling, return_exceptions=True)
        for session in self._sessions:
            with contextlib.suppress(TurnstreamError):
                reason = "the gateway has stopped"
                await finish_session(self._gateway.client, session.session_id, reason=reason)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _weights(self, model: str) -> _Weights:
        """Return the weights of a name; RunNotFoundError for a checkpoint that is not there."""
        parts = model.removeprefix("tinker://").split("/")
        if len(parts) != 3 or parts[1] != _SAVED:
            return _Weights(await self._gateway.bases.known(model), "local", "0")
        path = CheckpointPath.parse(f"tinker://{'/'.join(parts)}")
        owner = (await read_model_async(self._gateway.client, path.model_id)).owner
        saved = await self._gateway.threads.run(lambda client: read_checkpoint(client, owner, path))
        base = await self._gateway.bases.known(saved.base_model)
        return _Weights(base, owner, path.name, path)

    async def _tokenizer(self, base: BaseModel) -> ModelTokenizer:
        folder = base.tokenizer_id or base.name
        if folder not in self._tokenizers:
            load = functools.partial(ModelTokenizer.load, folder)
            self._tokenizers[folder] = await self._in_thread(load)
        return self._tokenizers[folder]

    async def _sampled(self, model: str, weights: _Weights, sampling: Sampling) -> SampleResult:
        try:
            session = await self._session(model, weights)
            session.num_running += 1
            try:
                return await self._result(session, sampling)
            finally:
                session.num_running -= 1
        except (RunNotFoundError, EndOfRunError, LookupError) as error:  # the store lost it
            self._current.pop(model, None)
            raise FailedEngineError(f"hosted={model}: {error}") from error

    async def _result(self, session: _OpenSession, sampling: Sampling) -> SampleResult:
        gateway, number = self._gateway, session.num_calls
        session.num_calls += 1
        request_id = await submit_sample(gateway.client, session.record, number, *sampling)
        try:
            stored = await gateway.polls.result(request_id, hold_s=self._timeout_s, check=_nothing)
        except (asyncio.CancelledError, UnknownRequestError, DroppedResultError):
            self._cancel(request_id)
            raise
        if stored is None:
            self._cancel(request_id)
            message = f"no sampler has answered for {self._timeout_s:g} s, the time of"
            raise UnavailableError(f"{message} --engine-timeout")
        with contextlib.suppress(UnavailableError):  # else it is kept for longer
            await keep_fetched(gateway.client, request_id, stored)
        result = decode_result(stored)
        if isinstance(result, Failure):
            if result.category == "user":
                raise _refusal(result.error)
            raise FailedEngineError(result.error)
        assert isinstance(result, SampleResult)
        return result

    def _cancel(self, request_id: RequestId) -> None:
        """Cancel a sample that no call awaits; its sampler drops it."""

        async def call() -> None:
            with contextlib.suppress(TurnstreamError):
                await cancel_sample(self._gateway.client, request_id)

        task = asyncio.create_task(call())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def _session(self, model: str, weights: _Weights) -> _OpenSession:
        """Return the sampling session of a model, a new one after many calls."""
        async with self._opening:
            session = self._current.get(model)
            if session is None or session.num_calls >= _CALLS_OF_SESSION:
                if not self._is_beating:
                    self._is_beating = True
                    beating = repeat(self._beat, what="sampling sessions get no heartbeat")
                    await self._exit.enter_async_context(background(beating, name="heartbeats"))
                session = self._current[model] = await self._opened(weights)
                self._sessions.append(session)
            return session

    async def _opened(self, weights: _Weights) -> _OpenSession:
        client, session_id = self._gateway.client, f"proxy-{secrets.token_hex(8)}"
        record = SamplerRecord(f"{session_id}:sample:0", weights.base.name, weights.owner)
        if weights.path is not None:
            folder = str(folder_of(weights.path))
            record = record._replace(model_path=str(weights.path), folder=folder)
        await open_session(client, Session(session_id, weights.owner, display_name="proxy"))
        await add_member(client, session_id, record.sampler_id)
        await write_sampler_async(client, record)
        return _OpenSession(record)

    async def _beat(self) -> None:
        """Keep the sessions in use, and end the others."""
        silence_s = self._gateway.options.session_silence_s
        await asyncio.sleep(min(_BEAT_S, silence_s / 4))
        for session in list(self._sessions):
            try:
                if session.num_running or session in self._current.values():
                    await beat(self._gateway.client, session.session_id)
                    continue
                reason = "the gateway has a newer one"
                await finish_session(self._gateway.client, session.session_id, reason=reason)
            except (RunNotFoundError, EndOfRunError):
                logger.debug("session %s has ended", session.session_id)
            self._sessions.remove(session)

    async def _in_thread(self, work: Callable[[], _Value]) -> _Value:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def engines_of(gateway: Gateway) -> Engines:
    """Return the engines of a gateway's options, which the caller enters."""
    options = gateway.options
    return Engines(
        options.engines,
        timeout_s=options.engine_timeout_s,
        api_key=options.engine_api_key,
        hosted=HostedSampler(gateway, timeout_s=options.engine_timeout_s),
    )


def params_of(body: Mapping[str, Any], *, route: Route, end_id: int | None) -> SamplingParams:
    """Return the parameters in a body; InvalidConfigError for one that is not supported.

    `end_id` ends a sequence in addition to `stop_token_ids`.

    >>> params_of({"max_tokens": 3, "stop": "A"}, route="completions", end_id=2).stop_strings
    ('A',)
    """
    for name, defaults in _UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and value not in defaults:
            message = f"{quoted(value)} is not supported by hosted models"
            raise InvalidConfigError(name, message)
    is_chat = route == "chat/completions"
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    stop, ids = body.get("stop") or (), body.get("stop_token_ids")
    stop_ids = (*ids, *(() if end_id is None else (end_id,))) if ids else None
    values = {
        "max_tokens": max_tokens or (None if is_chat else _MAX_TOKENS),
        "temperature": body.get("temperature"),
        "top_k": body.get("top_k") or -1,
        "top_p": body.get("top_p"),
        "stop_ids": () if body.get("ignore_eos") else stop_ids,
        "stop_strings": (stop,) if isinstance(stop, str) else tuple(stop),
        "seed": body.get("seed"),
        "num_samples": body.get("n"),
        "topk_sample_logprobs": body.get("top_logprobs") if is_chat else None,
    }
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    try:
        return SamplingParams(**given)
    except TypeError as error:  # a text in place of a number
        raise InvalidConfigError(
            "body", f"a sampling parameter has a wrong type: {error}"
        ) from error


def answer_of(
    result: SampleResult,
    body: Mapping[str, Any],
    prompt: list[int],
    *,
    tokenizer: ModelTokenizer,
    route: Route,
    label: str,
) -> dict[str, Any]:
    """Return a result as vLLM answers a call that asked for everything."""
    is_chat = route == "chat/completions"
    choices = [
        {
            "index": index,
            **_shown(each, body, tokenizer, is_chat=is_chat),
            "finish_reason": str(each.stop_reason),
            "stop_reason": None,
            "token_ids": (ids := each.token_ids.tolist()),
            "weight_versions": [{"version": label, "start": 0, "end": len(ids)}],
            **({} if is_chat else {"prompt_token_ids": prompt}),
        }
        for index, each in enumerate(result.sequences)
    ]
    num_sampled = sum(len(each.token_ids) for each in result.sequences)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(8)}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": body.get("model"),
        "choices": choices,
        "usage": {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + num_sampled,
            "completion_tokens": num_sampled,
        },
        **({"prompt_token_ids": prompt} if is_chat else {}),
    }


def _shown(
    sequence: SampledSequence, body: Mapping[str, Any], tokenizer: ModelTokenizer, *, is_chat: bool
) -> dict[str, Any]:
    """Return the text of a sequence and its log-probabilities."""
    ids, values = sequence.token_ids.tolist(), sequence.logprobs.tolist()
    stop = body.get("stop") or ()
    text = tokenizer.text(ids, stops=(stop,) if isinstance(stop, str) else stop)
    pieces = tokenizer.pieces(ids)
    if not is_chat:
        pairs = zip(pieces, values, strict=True)
        top = [{piece: value} for piece, value in pairs]
        logprobs = {"tokens": pieces, "token_logprobs": values, "top_logprobs": top}
        return {"text": text, "logprobs": logprobs}
    content = [
        {**_entry(piece, value), "top_logprobs": []}
        for piece, value in zip(pieces, values, strict=True)
    ]
    if (topk := sequence.topk) is not None:
        for entry, best, likely in zip(content, topk.token_ids, topk.logprobs, strict=True):
            named = zip(tokenizer.pieces(best.tolist()), likely.tolist(), strict=True)
            entry["top_logprobs"] = [_entry(piece, value) for piece, value in named]
    message = {"role": "assistant", "content": text}
    return {"message": message, "logprobs": {"content": content}}


def _entry(piece: str, value: float) -> dict[str, Any]:
    return {"token": piece, "logprob": value, "bytes": list(piece.encode(errors="replace"))}


def _check_model(body: Mapping[str, Any], names: set[str]) -> None:
    if (asked := body.get("model")) and asked not in names:
        raise _refusal(f"The model {quoted(asked)} does not exist.", field="model", status=404)


def _refusal(message: str, *, field: str | None = None, status: int = 400) -> EngineRefusalError:
    kind = "invalid_request_error"
    error = {"message": message, "type": kind, "param": field, "code": status}
    return EngineRefusalError(status, {"error": error})


async def _nothing() -> None:
    """Accept the request: it is ours."""
