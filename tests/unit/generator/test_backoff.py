from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.generator.outbox.outage import Backoff


def backoff(timeout_s: float = 100.0, jitter: float = 1.0) -> Backoff:
    return Backoff(timeout_s, jitter=lambda: jitter)


def pauses(trying: Backoff, num_failures: int) -> list[float]:
    """Fail as soon as another try may be made."""
    now_s = 50.0
    found = []
    for _ in range(num_failures):
        trying.failed(now_s)
        found.append(trying.pause_s(now_s))
        now_s += found[-1]
    return found


def test_pauses_double_up_to_a_second() -> None:
    assert pauses(backoff(), 7) == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


@given(st.floats(0, 1))
def test_jitter_at_most_halves_a_pause(jitter: float) -> None:
    (pause_s,) = pauses(backoff(jitter=jitter), 1)

    assert pause_s == pytest.approx(0.025 + 0.025 * jitter)


def test_success_ends_the_pause_and_the_outage() -> None:
    trying = backoff(timeout_s=10.0)
    pauses(trying, 7)

    trying.succeeded()

    assert trying.pause_s(50.0) == 0.0
    assert not trying.failed(1000.0)
    assert trying.pause_s(1000.0) == pytest.approx(0.05)


def test_an_outage_ends_with_its_deadline() -> None:
    trying = backoff(timeout_s=10.0)

    outcomes = [trying.failed(now_s) for now_s in (50.0, 59.99, 60.0)]

    assert outcomes == [False, False, True]


def test_no_pause_goes_beyond_the_deadline() -> None:
    trying = backoff(timeout_s=0.5)
    pauses(trying, 4)

    trying.failed(50.49)

    assert trying.pause_s(50.49) == pytest.approx(0.01)


def test_another_outage_starts_after_a_failed_one() -> None:
    trying = backoff(timeout_s=10.0)
    trying.failed(50.0)
    trying.failed(60.0)

    assert not trying.is_failing
    assert not trying.failed(61.0)
