"""Parsing of bodies: in the event loop, in threads of their own, or in processes.

A parser of JSON holds the interpreter lock until it has read the whole body, also in a thread. Then
no other request is answered, so large JSON is parsed in a process. JSON is counted before it is
parsed: few bytes may become many objects.
"""

from __future__ import annotations

import asyncio
import functools
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from anyio import BrokenWorkerProcess, CapacityLimiter, to_process

from turnstream.errors import RecordError, UnavailableError
from turnstream_server.interpreter import return_free_memory
from turnstream_server.keys.limits import Places

IN_LOOP_BYTES: Final = 64 << 10
"""Largest body that is parsed in the event loop: a thread costs more than that."""

IN_THREAD_JSON_BYTES: Final = 256 << 10
"""Largest JSON that is parsed in a thread: a process costs more than that."""

MAX_JSON_BYTES: Final = 12 << 20
"""Largest body of JSON. Parsed, it takes up to fifteen times its size in memory."""

MAX_BRACKETS: Final = 1 << 19
"""Objects and lists of one JSON body: each takes up to 200 bytes and 4 µs. Texts count too."""

MAX_QUOTES: Final = 1 << 20
"""Quotation marks of one JSON body, two per text."""

_NUM_THREADS: Final = 4
_NUM_PROCESSES: Final = 2
"""An owner uses half of either at most, so that another one gets the next free one."""

_LONGEST_S: Final = 60.0
"""Time for one call of a process. The largest body takes about 2 s of a core."""

_Result = TypeVar("_Result")


class Parsers:
    """The threads and processes that parse the bodies of one gateway process."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="gateway-parse")
        self._thread_places = _half_of(_NUM_THREADS)
        self._process_places = _half_of(_NUM_PROCESSES)
        self._free_processes = asyncio.Semaphore(_NUM_PROCESSES)

    async def run(
        self,
        parse: Callable[[bytes], _Result],
        body: bytes,
        *,
        owner: str,
        is_json: bool = False,
    ) -> _Result:
        """Return the content of a body, or raise the error of its parser.

        If `is_json`, the parser holds the interpreter lock, and can be pickled with its result and
        its errors. RecordError for JSON that would become too many Python objects; a body that is
        parsed in the event loop is too small for that.
        """
        if len(body) <= IN_LOOP_BYTES:
            return parse(body)
        if is_json:
            parse = functools.partial(_parse_json, parse)
        if is_json and len(body) > IN_THREAD_JSON_BYTES:
            async with self._process_places.borrow(owner) as place:
                await place.take()
                async with self._free_processes:
                    return await self._in_process(parse, body)
        return await self.in_thread(lambda: parse(body), owner=owner)

    async def in_thread(self, call: Callable[[], _Result], *, owner: str) -> _Result:
        """Return the result of a call that holds the interpreter lock for short times only."""
        async with self._thread_places.borrow(owner) as place:
            await place.take()
            return await self._in_thread(call)

    async def close(self) -> None:
        """End the threads, once running calls have returned. Processes end with the event loop."""
        await asyncio.to_thread(self._threads.shutdown)

    async def _in_thread(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _in_process(self, parse: Callable[[bytes], _Result], body: bytes) -> _Result:
        """Return the result of a process; UnavailableError if it has ended, or takes too long."""
        try:
            async with asyncio.timeout(_LONGEST_S):
                answer = await to_process.run_sync(
                    *(_pickled, parse, body), cancellable=True, limiter=CapacityLimiter(1)
                )
        except TimeoutError as error:
            text = f"the body was not parsed within {_LONGEST_S:g} s"
            raise UnavailableError(text) from error
        except BrokenWorkerProcess as error:
            raise UnavailableError("the process that parses the body has ended") from error
        return await self._in_thread(lambda: pickle.loads(answer))  # noqa: S301 - ours


def _pickled(parse: Callable[[bytes], Any], body: bytes) -> bytes:
    """Return the content of a body, pickled: the caller reads it in a thread.

    Ctrl-C reaches this process too. The gateway finishes its requests first, so it is ignored.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer = pickle.dumps(parse(body), protocol=5)
    return_free_memory()
    return answer


def _parse_json(parse: Callable[[bytes], _Result], body: bytes) -> _Result:
    if len(body) > MAX_JSON_BYTES:
        raise RecordError(f"the body has {len(body)} bytes of JSON, more than {MAX_JSON_BYTES}")
    found = {"brackets": body.count(b"{") + body.count(b"["), "quotation marks": body.count(b'"')}
    for (name, count), most in zip(found.items(), (MAX_BRACKETS, MAX_QUOTES), strict=True):
        if count > most:
            raise RecordError(f"the body has {count} {name}, more than {most}: send less at once")
    return parse(body)


def _half_of(num_places: int) -> Places:
    most = num_places // 2
    return Places(shared=most, alone=most, held_s=_LONGEST_S)
