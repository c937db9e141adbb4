"""Token buckets of keys, with a clock of numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from turnstream_server.keys.limits import BURST_S, Meter, Meters, TokenBucket
from turnstream_server.keys.records import ApiKey, KeyLimits

rates = st.floats(0.01, 1e6)


@given(rates, st.lists(st.floats(0, 10), max_size=50))
def test_mean_rate_is_never_exceeded_by_more_than_a_burst(rate: float, pauses: list[float]):
    bucket, now_s, used = TokenBucket(rate, now_s=0.0), 0.0, 0
    for pause_s in pauses:
        now_s += pause_s
        while used < 1_000 and bucket.missing_s(1, now_s=now_s) == 0:
            bucket.take(1)
            used += 1

    assert used <= max(1.0, rate * BURST_S) + rate * now_s + 1e-6 * used


@given(rates, st.floats(0.1, 1e9))
def test_a_wait_is_long_enough_and_no_longer(rate: float, amount: float):
    bucket = TokenBucket(rate, now_s=0.0)
    bucket.take(amount)

    wait_s = bucket.missing_s(amount, now_s=0.0)

    assert bucket.missing_s(amount, now_s=wait_s * 0.999) > 0 or wait_s < 1e-6
    assert bucket.missing_s(amount, now_s=wait_s * 1.001) == 0


def test_a_clock_that_stands_still_refills_nothing():
    bucket = TokenBucket(10.0, now_s=5.0)
    bucket.take(20)

    assert bucket.missing_s(1, now_s=5.0) == bucket.missing_s(1, now_s=4.0) == 0.1


METERS: list[tuple[KeyLimits, list[tuple[int, float]], list[float]]] = [
    (KeyLimits(requests_per_s=0.1), [(0, 0.0), (0, 0.0)], [0.0, 10.0]),
    # A refused request uses nothing of the other limit.
    (KeyLimits(1.0, 100.0), [(200, 0.0), (100, 0.0), (0, 0.0)], [0.0, 1.0, 0.0]),
    # A body above the burst waits for a full bucket, and is paid later.
    (KeyLimits(bytes_per_s=100.0), [(1_000, 0.0), (1, 0.0), (1, 8.01)], [0.0, 8.01, 0.0]),
]
"""Limits, the bytes and times of requests, and their waits."""


def test_requests_wait_for_both_limits_of_their_key():
    for limits, requests, waits in METERS:
        meter = Meter(limits, now_s=0.0)
        assert [meter.admit(num_bytes, now_s=at_s) for num_bytes, at_s in requests] == waits

    meter = Meter(KeyLimits(bytes_per_s=100.0), now_s=0.0)
    assert meter.admit(0, now_s=0.0) == 0.0
    meter.add_bytes(500)  # of unknown length
    assert meter.admit(0, now_s=0.0) == 3.0


def test_keys_are_counted_apart_and_by_their_present_limits():
    limits = KeyLimits(requests_per_s=1.0)
    one, two = (ApiKey(each, each, frozenset(), limits=limits) for each in ("one", "two"))
    meters = Meters()

    def waits(key: ApiKey) -> list[float]:
        meter = meters.of(key, now_s=0.0)
        assert meter is not None
        return [meter.admit(0, now_s=0.0) for _ in range(3)]

    changed = one._replace(limits=KeyLimits(requests_per_s=2.0))
    assert [waits(one), waits(two), waits(changed)] == [[0, 0, 1], [0, 0, 1], [0, 0, 0]]
    assert meters.of(one._replace(limits=KeyLimits(max_body_bytes=5)), now_s=0.0) is None
