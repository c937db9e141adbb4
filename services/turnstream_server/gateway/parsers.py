"""Parsing of bodies: in the event loop, in threads of their own, or in processes.

A parser of JSON holds the interpreter lock until it has read the whole body, also in a thread, and
no other request is answered meanwhile. So large JSON is parsed in a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from turnstream_server.gateway.parse_process import ParseProcess

IN_LOOP_BYTES: Final = 64 << 10
"""Largest body that is parsed in the event loop: a thread costs more than that."""

IN_THREAD_JSON_BYTES: Final = 256 << 10
"""Largest JSON that is parsed in a thread: a process costs more than that."""

_NUM_THREADS: Final = 4
_NUM_PROCESSES: Final = 2

_Result = TypeVar("_Result")


class FairPlaces:
    """Places for work. An owner has at most half of them, so that others get the next free one."""

    def __init__(self, num_places: int) -> None:
        self._free = num_places
        self._most = max(1, num_places // 2)
        self._used: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Hold a place in the block."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((owner, turn))
        self._grant()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += 1
                self._used[owner] -= 1
            self._grant()

    def _grant(self) -> None:
        """Give free places to the first in the queue whose owners may have one."""
        left: list[tuple[str, asyncio.Future[None]]] = []
        for owner, turn in self._waiting:
            if turn.cancelled():
                continue
            if not self._free or self._used[owner] >= self._most:
                left.append((owner, turn))
                continue
            self._free -= 1
            self._used[owner] += 1
            turn.set_result(None)
        self._waiting = left
        self._used += Counter()  # drops owners without a place


class Parsers:
    """The threads and processes that parse the bodies of one gateway process."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="gateway-parse")
        self._thread_places = FairPlaces(_NUM_THREADS)
        self._process_places = FairPlaces(_NUM_PROCESSES)
        self._idle: list[ParseProcess] = []

    async def run(
        self,
        parse: Callable[[bytes], _Result],
        body: bytes,
        *,
        owner: str,
        is_json: bool = False,
    ) -> _Result:
        """Return the content of a body, or raise the error of its parser.

        Args:
            parse: can be pickled, with its result and its errors, if `is_json`.
            body: the whole body.
            owner: owner of the key of the request.
            is_json: the parser holds the interpreter lock.
        """
        if len(body) <= IN_LOOP_BYTES:
            return parse(body)
        if is_json and len(body) > IN_THREAD_JSON_BYTES:
            async with self._process_places.place(owner):
                return await self._in_process(parse, body)
        return await self.in_thread(lambda: parse(body), owner=owner)

    async def in_thread(self, call: Callable[[], _Result], *, owner: str) -> _Result:
        """Return the result of a call that holds the interpreter lock for short times only."""
        async with self._thread_places.place(owner):
            return await self._in_thread(call)

    async def close(self) -> None:
        """End the threads and processes, once running calls have returned."""
        for each in self._idle:
            await each.end()
        await asyncio.to_thread(self._threads.shutdown)

    async def _in_thread(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _in_process(self, parse: Callable[[bytes], Any], body: bytes) -> Any:
        process = self._idle.pop() if self._idle else await ParseProcess.start()
        try:
            answer = await process.answer(parse, body)
        except BaseException:  # a cancelled request, too: the process is still at work
            await process.end()
            raise
        self._idle.append(process)
        is_error, result = await self._in_thread(lambda: pickle.loads(answer))  # noqa: S301 - ours
        if is_error:
            raise result
        return result
