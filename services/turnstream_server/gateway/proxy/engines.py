"""Calls of inference servers: the choice of an engine, repeats, and waits for a paused one.

A call in flight has one connection, which costs 31 KiB of memory and a file. At 500 calls at the
same time a call costs 1.3 ms of CPU time, at 4,000 of them 2.6 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, Self

import httpx2
from pydantic_core import to_json

from turnstream.errors import InvalidConfigError, UnavailableError
from turnstream_server.gateway.config import ENGINE_TIMEOUT_S, EngineAddress
from turnstream_server.gateway.proxy.answers import (
    CutStreamError,
    EngineAnswer,
    EngineRefusalError,
    EngineStream,
    FailedEngineError,
    PausedEngineError,
    described,
    is_refusal,
    read_error,
    read_whole,
    reason_of,
)
from turnstream_server.gateway.proxy.requests import Route, engine_body

__all__ = ["CutStreamError", "EngineAddress", "EngineAnswer", "EngineRefusalError", "Engines"]

logger = logging.getLogger(__name__)

MAX_CALLS: Final = 4_096
"""Calls in flight of one process."""

_NUM_POOLS: Final = 64
"""The work of a pool of connections for each call grows with its number of connections."""

_IDLE_S: Final = 3.0
"""Time for which an idle connection is kept; vLLM and SGLang close one after 5 s."""

_CONNECT_S: Final = 10.0
_MAX_TRIES: Final = 3
_RETRY_S: Final = 0.1
"""Pause before the only engine is called again; each further one is twice as long."""

_DOWN_S: Final = 10.0
"""Time for which an engine that failed comes last."""

_PAUSED: Final = re.compile("paus|sleep|scaling|weight", re.IGNORECASE)
_PAUSED_S: Final = 60.0
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_MODELS_S: Final = 10.0
_KEY_STATUSES: Final = (401, 403)


class HostedModels(Protocol):
    """Samples from the models that this store hosts."""

    async def complete(
        self, model: str, body: Mapping[str, Any], *, route: Route
    ) -> Mapping[str, Any]:
        """Return the answer to a call, in the shape of vLLM; errors as of `Engines.call`."""
        ...

    async def cards(self, model: str) -> list[dict[str, Any]]:
        """Return the cards of the model, as `/v1/models` has them."""
        ...

    async def close(self) -> None:
        """End the work."""
        ...


class Engines:
    """The engines of one gateway process, an async context manager.

    Args:
        addresses: the engines; a request names none.
        timeout_s: longest silence of an engine, in seconds.
        api_key: sent to engines as bearer token, if it is not empty.
        hosted: answers calls of engines of the kind "hosted".
    """

    def __init__(
        self,
        addresses: Sequence[EngineAddress],
        *,
        timeout_s: float = ENGINE_TIMEOUT_S,
        api_key: str = "",
        hosted: HostedModels | None = None,
    ) -> None:
        self._addresses = list(dict.fromkeys(addresses))
        assert hosted or all(each.kind != "hosted" for each in addresses)
        self._timeout_s = timeout_s
        self._headers = {"Accept-Encoding": "identity"}  # a packed answer may have any size
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._hosted = hosted
        self._pools: list[httpx2.AsyncClient] = []
        self._down_until_s: dict[EngineAddress, float] = {}
        self._cards: list[dict[str, Any]] = []
        self._cards_until_s = -1.0
        self._listing = asyncio.Lock()
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        context = httpx2.create_ssl_context()
        timeout = httpx2.Timeout(self._timeout_s, connect=_CONNECT_S)
        limits = httpx2.Limits(max_connections=MAX_CALLS // _NUM_POOLS, keepalive_expiry=_IDLE_S)
        for _ in range(_NUM_POOLS if self._addresses else 0):
            pool = httpx2.AsyncClient(
                headers=self._headers, timeout=timeout, limits=limits, verify=context
            )
            self._pools.append(await self._exit.enter_async_context(pool))
        if self._hosted is not None:
            self._exit.push_async_callback(self._hosted.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    def ordered(self, session: str) -> list[EngineAddress]:
        """Return the engines for a session: always in the same order, healthy ones first.

        Another engine in the list, or one less, changes the first engine of few sessions.
        """
        now_s = time.monotonic()
        return sorted(
            self._addresses,
            key=lambda each: (self._down_until_s.get(each, 0.0) > now_s, -_rank(session, each)),
        )

    @contextlib.asynccontextmanager
    async def call(
        self,
        route: Route,
        body: Mapping[str, Any],
        *,
        session: str,
        is_captured: bool = True,
    ) -> AsyncIterator[EngineAnswer]:
        """Pass a call to an engine; yield its answer. The end of the block ends the call.

        An engine that fails before its first chunk, or before the end of an answer that is no
        stream, is replaced by the next one; the only engine is called again. There are 3 tries.

        Args:
            route: path of the call below `/v1/`.
            body: body of the agent.
            session: calls of one session go to one engine.
            is_captured: ask for everything that a turn has; see `engine_body`.

        Raises:
            InvalidConfigError: an option is not supported; `field` is its name.
            EngineRefusalError: the engine refused the call.
            RejectedError: the answer is larger than 8 MiB.
            UnavailableError: no engine answered, or one was silent, or paused for 60 s.
        """
        if is_captured:
            engine_body(body, route=route, kind="vllm")  # refuse first
        async with contextlib.AsyncExitStack() as stack:
            yield await self._answer(stack, route, body, session, is_captured=is_captured)

    async def models(self) -> list[dict[str, Any]]:
        """Return the models of all engines that answer, each id once; known for 10 s.

        UnavailableError if no engine answers.
        """
        async with self._listing:
            if time.monotonic() >= self._cards_until_s:
                self._cards = await self._read_models()
                self._cards_until_s = time.monotonic() + _MODELS_S
        return self._cards

    async def _answer(
        self,
        stack: contextlib.AsyncExitStack,
        route: Route,
        body: Mapping[str, Any],
        session: str,
        *,
        is_captured: bool,
    ) -> EngineAnswer:
        if not self._addresses:
            raise InvalidConfigError("--engine", "this gateway has no engine")
        engines = self.ordered(session)
        pool = self._pools[_rank(session) % _NUM_POOLS]
        pause_until_s = time.monotonic() + _PAUSED_S
        num_failed = num_pauses = 0
        while True:
            engine = engines[num_failed % len(engines)]
            try:
                return await self._try(stack, pool, engine, route, body, is_captured=is_captured)
            except PausedEngineError as error:
                pause_s = min(_FIRST_PAUSE_S * 2**num_pauses, _LONGEST_PAUSE_S)
                num_pauses += 1
                if time.monotonic() + pause_s > pause_until_s:
                    raise UnavailableError(f"{error}, for {_PAUSED_S:g} s") from error
            except FailedEngineError as error:
                num_failed += 1
                self._down_until_s[engine] = time.monotonic() + _DOWN_S
                logger.warning("%s", error)
                if num_failed == _MAX_TRIES:
                    message = f"{_MAX_TRIES} tries at {len(engines)} engines have failed: {error}"
                    raise UnavailableError(message) from error
                pause_s = _RETRY_S * 2 ** (num_failed // len(engines)) / 2
                pause_s *= num_failed >= len(engines)  # else another engine is next
            await asyncio.sleep(pause_s)

    async def _try(
        self,
        stack: contextlib.AsyncExitStack,
        pool: httpx2.AsyncClient,
        engine: EngineAddress,
        route: Route,
        body: Mapping[str, Any],
        *,
        is_captured: bool,
    ) -> EngineAnswer:
        """Return the answer of one engine, of a stream after its first chunk."""
        kind = engine.kind
        asked = engine_body(body, route=route, kind=kind) if is_captured else body
        if kind == "hosted":
            assert self._hosted is not None
            content = await self._hosted.complete(engine.url, asked, route=route)
        else:
            url = f"{engine.url}/v1/{route}"
            content = await self._post(stack, pool, url, asked, engine=str(engine))
        self._down_until_s.pop(engine, None)
        is_stream = bool(body.get("stream"))
        return EngineAnswer(content, kind=kind, engine=str(engine), is_stream=is_stream)

    async def _post(
        self,
        stack: contextlib.AsyncExitStack,
        pool: httpx2.AsyncClient,
        url: str,
        body: Mapping[str, Any],
        *,
        engine: str,
    ) -> dict[str, Any] | EngineStream:
        headers = {"Content-Type": "application/json"}
        request = pool.build_request("POST", url, content=to_json(body), headers=headers)
        with self._translated(engine):
            response = await pool.send(request, stream=True)
            async with contextlib.AsyncExitStack() as own:
                own.push_async_callback(response.aclose)
                if not response.is_success:
                    raise await self._error(response, engine=engine)
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    return await read_whole(response, engine=engine)
                stream = EngineStream(response, engine=engine)
                own.push_async_callback(stream.close)
                await stream.peek()
                await stack.enter_async_context(own.pop_all())
                return stream

    async def _error(self, response: httpx2.Response, *, engine: str) -> Exception:
        status, body = response.status_code, await read_error(response)
        if status in _KEY_STATUSES:
            logger.warning("%s: HTTP %d: set TURNSTREAM_ENGINE_API_KEY", engine, status)
        if is_refusal(status):
            return EngineRefusalError(status, body)
        message = f"{engine}: HTTP {status}: {reason_of(body)}"
        if status == 503 and (len(self._addresses) == 1 or _PAUSED.search(reason_of(body))):
            return PausedEngineError(message)
        return FailedEngineError(message)

    @contextlib.contextmanager
    def _translated(self, engine: str) -> Iterator[None]:
        """Translate errors of the connection. A silent engine may work on the call still."""
        try:
            yield
        except httpx2.ReadTimeout as error:
            message = f"{engine} was silent for {self._timeout_s:g} s, the time of --engine-timeout"
            raise UnavailableError(message) from error
        except httpx2.HTTPError as error:
            raise FailedEngineError(f"{engine}: {described(error)}") from error

    async def _read_models(self) -> list[dict[str, Any]]:
        listed = await asyncio.gather(*map(self._list, self._addresses), return_exceptions=True)
        errors = [each for each in listed if isinstance(each, BaseException)]
        if errors and len(errors) == len(listed):
            raise errors[0]
        cards: dict[str, dict[str, Any]] = {}
        for found in listed:
            for card in () if isinstance(found, BaseException) else found:
                cards.setdefault(str(card.get("id")), card)
        return list(cards.values())

    async def _list(self, engine: EngineAddress) -> list[dict[str, Any]]:
        if engine.kind == "hosted":
            assert self._hosted is not None
            return await self._hosted.cards(engine.url)
        url = f"{engine.url}/v1/models"
        with self._translated(str(engine)):
            async with self._pools[0].stream("GET", url, timeout=_CONNECT_S) as response:
                body = await read_error(response)
        if not response.is_success or not isinstance(cards := body.get("data"), list):
            message = f"{engine}: HTTP {response.status_code}: {reason_of(body)}"
            raise FailedEngineError(message)
        return [card for card in cards if isinstance(card, dict)]


def _rank(session: str, engine: EngineAddress | None = None) -> int:
    """Return a number of a session, and of an engine for it (rendezvous hash)."""
    named = f"{session}\n{engine or ''}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest())
