"""Limits of the requests of each key in one process, as token buckets. Time is an argument."""

from __future__ import annotations

import math
from typing import Final

from turnstream.errors import RejectedError
from turnstream_server.keys.records import ApiKey, KeyLimits

BURST_S: Final = 2.0
"""A bucket holds what its rate allows in so many seconds."""

_MAX_METERS: Final = 10_000


class TokenBucket:
    """Units that may be used at once, refilled at a rate.

    >>> bucket = TokenBucket(1.0, now_s=0.0)
    >>> [bucket.missing_s(1, now_s=0.0), bucket.take(2), bucket.missing_s(1, now_s=0.25)]
    [0.0, None, 0.75]

    Args:
        rate: units per second.
        now_s: seconds of any clock that does not go back.
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
    """Use of one key.

    Args:
        limits: those of the key.
        now_s: present time.
    """

    def __init__(self, limits: KeyLimits, *, now_s: float) -> None:
        self.limits = limits
        self._requests = _bucket(limits.requests_per_s, now_s=now_s)
        self._bytes = _bucket(limits.bytes_per_s, now_s=now_s)

    def admit(self, num_bytes: int, *, now_s: float) -> float:
        """Count a request and return 0, or return the seconds until it can be admitted.

        `num_bytes` are those of its body, as far as they are known.
        """
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
        """Count a request whose `num_bytes` are known.

        Raises:
            RejectedError: it is too large, or the key has used its rate: see `retry_after_s`.
        """
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
