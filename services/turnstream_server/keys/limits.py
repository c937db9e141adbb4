"""Limits of the requests of each key in one process: rates, and places for requests in work.

A rate is a token bucket. Its time is an argument.

All requests of a process share one event loop and one interpreter. Without places, a request waits
for every request in work of the other keys. With them, it waits for a few of each key, however many
connections that key has.

- A request with a body takes its place once the body is there: a slow upload holds none.
- A request that waits for something holds none: a poll, an event stream, a wait for a task. An
  answer that is being sent holds none.
- The place of a request is held for two seconds at most, because the store may be away or silent.
- A gateway also has places for its parsers. They are held for the whole work, which waits for
  nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Final

from turnstream.errors import RejectedError
from turnstream_server.keys.records import ApiKey, KeyLimits

BURST_S: Final = 2.0
"""A bucket holds what its rate allows in so many seconds."""

_MAX_METERS: Final = 10_000

_HELD_S: Final = 2.0

_SHARED_S: Final = 60.0
"""Time after a request of another key in which a process counts as shared."""

_RETRY_S: Final = 5.0

_PRESENT: ContextVar[Place | None] = ContextVar("place", default=None)


class TokenBucket:
    """Units that may be used at once, refilled at a rate per second of any clock.

    >>> bucket = TokenBucket(1.0, now_s=0.0)
    >>> [bucket.missing_s(1, now_s=0.0), bucket.take(2), bucket.missing_s(1, now_s=0.25)]
    [0.0, None, 0.75]
    """

    def __init__(self, rate: float, *, now_s: float) -> None:
        self._rate = rate
        self._capacity = max(1.0, rate * BURST_S)
        self._units = self._capacity
        self._filled_s = now_s

    def missing_s(self, amount: float, *, now_s: float) -> float:
        """Return the seconds until so many units are there; 0 if they are.

        More units than there can ever be are there when the bucket is full.
        """
        gained = max(0.0, now_s - self._filled_s) * self._rate
        self._units = min(self._capacity, self._units + gained)
        self._filled_s = max(self._filled_s, now_s)
        missing = min(amount, self._capacity) - self._units
        return max(0.0, missing / self._rate)

    def take(self, amount: float) -> None:
        """Use units. The number may fall below 0: later uses wait longer."""
        self._units -= amount


class Meter:
    """Use of one key with these limits."""

    def __init__(self, limits: KeyLimits, *, now_s: float) -> None:
        self.limits = limits
        self._requests = _bucket(limits.requests_per_s, now_s=now_s)
        self._bytes = _bucket(limits.bytes_per_s, now_s=now_s)

    def admit(self, num_bytes: int, *, now_s: float) -> float:
        """Count a request with a body of known bytes; return 0, or the seconds until it can be."""
        wanted = ((self._requests, 1), (self._bytes, num_bytes))
        buckets = [(bucket, amount) for bucket, amount in wanted if bucket is not None]
        wait_s = max((each.missing_s(n, now_s=now_s) for each, n in buckets), default=0.0)
        if wait_s == 0.0:
            for bucket, amount in buckets:
                bucket.take(amount)
        return wait_s

    def add_bytes(self, num_bytes: int) -> None:
        """Count bytes of a body that were not known before."""
        if self._bytes is not None:
            self._bytes.take(num_bytes)


class Meters:
    """Use of all keys with limits in one process."""

    def __init__(self) -> None:
        self._meters: dict[str, Meter] = {}

    def of(self, key: ApiKey, *, now_s: float) -> Meter | None:
        """Return the use of a key; None for one without limits."""
        if key.limits.requests_per_s is None and key.limits.bytes_per_s is None:
            return None
        meter = self._meters.get(key.key_id)
        if meter is None or meter.limits != key.limits:
            if len(self._meters) >= _MAX_METERS:
                self._meters.clear()
            meter = self._meters[key.key_id] = Meter(key.limits, now_s=now_s)
        return meter

    def admit(self, key: ApiKey, *, num_bytes: int, now_s: float) -> None:
        """Count a request; RejectedError for a body or a rate above the limits of its key."""
        most = key.limits.max_body_bytes
        if most is not None and num_bytes > most:
            raise RejectedError(
                f"key {key.name!r} may send {most} bytes in a request, and not {num_bytes}"
            )
        meter = self.of(key, now_s=now_s)
        wait_s = 0.0 if meter is None else meter.admit(num_bytes, now_s=now_s)
        if wait_s:
            raise too_fast(key, wait_s=wait_s)


def too_fast(key: ApiKey, *, wait_s: float) -> RejectedError:
    """Return the error of a request that can be admitted in `wait_s` seconds."""
    requests, num_bytes, _ = key.limits
    limits = [
        f"{limit:g} {unit} per second"
        for limit, unit in ((requests, "requests"), (num_bytes, "bytes"))
        if limit is not None
    ]
    text = f"key {key.name!r} may use {' and '.join(limits)}: wait {wait_s:.1f} s"
    return RejectedError(text, wait_s)


def _bucket(rate: float | None, *, now_s: float) -> TokenBucket | None:
    return None if rate is None or math.isinf(rate) else TokenBucket(rate, now_s=now_s)


class Places:
    """The places of one process, by the name of their owner.

    Args:
        shared: requests in work of one owner, while others use the process.
        alone: requests in work of an owner that is alone: it waits for a slow disk, too.
        held_s: longest time for which a request holds its place.
    """

    def __init__(self, *, shared: int, alone: int, held_s: float = _HELD_S) -> None:
        self._shared = shared
        self._alone = alone
        self._held_s = held_s
        self._queues: dict[str, _Queue] = {}
        self._newest_owner: str | None = None
        self._shared_until_s = 0.0

    @property
    def limit(self) -> int:
        """Return the number of requests in work that one owner may have now."""
        return self._shared if _now_s() < self._shared_until_s else self._alone

    def num_present(self, owner: str) -> int:
        """Return the number of requests of an owner, waiting ones included."""
        queue = self._queues.get(owner)
        return 0 if queue is None else queue.num_present

    @contextlib.asynccontextmanager
    async def borrow(self, owner: str) -> AsyncIterator[Place]:
        """Yield the place of a request, not yet taken; it is released after the block."""
        if owner != self._newest_owner:
            is_first = self._newest_owner is None
            self._newest_owner = owner
            self._shared_until_s = 0.0 if is_first else _now_s() + _SHARED_S
        queue = self._queues.setdefault(owner, _Queue(self, owner))
        place = Place(queue, held_s=self._held_s)
        token = _PRESENT.set(place)
        queue.num_present += 1
        try:
            yield place
        finally:
            place.release()
            _PRESENT.reset(token)
            queue.num_present -= 1
            self.drop_unused(owner)

    def drop_unused(self, owner: str) -> None:
        """Drop the queue of an owner without requests."""
        queue = self._queues.get(owner)
        if queue is not None and not queue.num_present and not queue.num_taken:
            del self._queues[owner]


class _Queue:
    """The requests of one owner; `num_taken` of them are in work."""

    def __init__(self, places: Places, owner: str) -> None:
        self.num_present = 0
        self.num_taken = 0
        self._places = places
        self._owner = owner
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Take a place, in order."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the place came in the same moment
                self.release()
            raise

    def release(self) -> None:
        """Pass a place on to the next request, after the event loop has served other owners.

        A short request never waits, and hundreds of them would follow each other at once.
        """
        asyncio.get_running_loop().call_soon(self._pass_on)

    def _pass_on(self) -> None:
        self.num_taken -= 1
        self._grant()
        self._places.drop_unused(self._owner)

    def _grant(self) -> None:
        while self._waiting and (self._waiting[0].done() or self.num_taken < self._places.limit):
            turn = self._waiting.popleft()
            if not turn.done():
                self.num_taken += 1
                turn.set_result(None)


class Place:
    """The place of one request."""

    def __init__(self, queue: _Queue, *, held_s: float) -> None:
        self._queue = queue
        self._held_s = held_s
        self._limit: asyncio.TimerHandle | None = None

    async def take(self) -> None:
        """Wait for the place."""
        await self._queue.take()
        self._limit = asyncio.get_running_loop().call_later(self._held_s, self.release)

    def release(self) -> None:
        """Pass the place on to the next request of the owner. Safe to repeat."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
            self._queue.release()


def release_place() -> None:
    """Release the place of the current request, if any, which begins to wait."""
    if (place := _PRESENT.get()) is not None:
        place.release()


@contextlib.asynccontextmanager
async def without_place() -> AsyncIterator[None]:
    """Release the place of the current request, if any, and take one again after the block.

    The request must hold no lock. After an error in the block it has no place.
    """
    release_place()
    yield
    if (place := _PRESENT.get()) is not None:
        await place.take()


class Held:
    """Counts requests of one kind that are held for long, in the process and of each key."""

    def __init__(self, what: str, *, num: int, num_of_key: int) -> None:
        self._what = what
        self._num = num
        self._num_of_key = num_of_key
        self._held: dict[str, int] = {}

    def check(self, key_id: str) -> None:
        """Raise RejectedError if the process, or the key, has as many as it may have."""
        num, own = sum(self._held.values()), self._held.get(key_id, 0)
        if own >= self._num_of_key:
            message = f"{own} {self._what} of this key are open, the limit of a key"
            raise RejectedError(message, _RETRY_S)
        if num >= self._num:
            raise RejectedError(f"{num} {self._what} are open, the limit", _RETRY_S)

    @contextlib.contextmanager
    def one_more(self, key_id: str) -> Iterator[None]:
        """Count one more in the block; errors as of `check`."""
        self.check(key_id)
        self._held[key_id] = self._held.get(key_id, 0) + 1
        try:
            yield
        finally:
            self._held[key_id] -= 1
            if not self._held[key_id]:
                del self._held[key_id]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
