"""A cache of expensive values: each is made once for all callers; the bytes in it are bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Sized(NamedTuple, Generic[Value]):
    """A made value and the memory it holds."""

    value: Value
    num_bytes: int


class SingleFlightCache(Generic[Key, Value]):
    """Caches values; the least recently used are dropped above `max_bytes`.

    A value larger than the limit is returned to its callers and not kept. An error is not kept
    either: all callers get it, and the next call starts again.

    Attributes:
        num_bytes: bytes of the kept values.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[Key, Sized[Value]] = OrderedDict()
        self._in_progress: dict[Key, asyncio.Task[Value]] = {}

    async def get(self, key: Key, make: Callable[[], Awaitable[Sized[Value]]]) -> Value:
        """Return the value of `key`; `make` is called unless the value exists or is being made.

        A cancelled caller does not stop `make`: others may wait for the same value.
        """
        kept = self._kept.get(key)
        if kept is None:
            return await asyncio.shield(self._begin(key, make))
        self._kept.move_to_end(key)
        return kept.value

    def prepare(self, key: Key, make: Callable[[], Awaitable[Sized[Value]]]) -> None:
        """Begin to make a value that will be requested soon."""
        if key not in self._kept:
            self._begin(key, make)

    def is_kept(self, key: Key) -> bool:
        """Return whether the cache has the value of `key`."""
        return key in self._kept

    def _keep(self, key: Key, sized: Sized[Value]) -> None:
        if sized.num_bytes > self._max_bytes:
            return
        self._kept[key] = sized
        self.num_bytes += sized.num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def drop(self, is_unwanted: Callable[[Key], bool]) -> None:
        """Drop the values of all such keys; values that are being made are kept."""
        for key in [key for key in self._kept if is_unwanted(key)]:
            self.num_bytes -= self._kept.pop(key).num_bytes

    async def close(self) -> None:
        """Cancel the values that are being made, and drop all others."""
        tasks = list(self._in_progress.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._in_progress.clear()
        self.drop(lambda _: True)

    def _begin(self, key: Key, make: Callable[[], Awaitable[Sized[Value]]]) -> asyncio.Task[Value]:
        task = self._in_progress.get(key)
        if task is None:
            task = self._in_progress[key] = asyncio.create_task(self._make(key, make))
            task.add_done_callback(_mark_retrieved)
        return task

    async def _make(self, key: Key, make: Callable[[], Awaitable[Sized[Value]]]) -> Value:
        try:
            sized = await make()
        finally:
            self._in_progress.pop(key, None)
        self._keep(key, sized)
        return sized.value


def _mark_retrieved(task: asyncio.Task[Value]) -> None:
    """Read the error, in case every caller was cancelled."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
