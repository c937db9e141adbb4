from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.generator.outbox.waits import Outage


def outage(timeout_s: float = 100.0, jitter: float = 1.0) -> Outage:
    return Outage(timeout_s, jitter=lambda: jitter, address="?")


def fail(trying: Outage, *times_s: float) -> list[bool]:
    return [trying.failed("gone", now_s, since_s=now_s) for now_s in times_s]


def pauses(trying: Outage, num_failures: int) -> list[float]:
    """Fail as soon as another try may be made."""
    now_s = 50.0
    found = []
    for _ in range(num_failures):
        fail(trying, now_s)
        found.append(trying.pause_s(now_s))
        now_s += found[-1]
    return found


def test_pauses_double_up_to_a_second() -> None:
    assert pauses(outage(), 7) == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


@given(st.floats(0, 1))
def test_jitter_at_most_halves_a_pause(jitter: float) -> None:
    assert pauses(outage(jitter=jitter), 1) == pytest.approx([0.025 + 0.025 * jitter])


def test_success_ends_the_pause_and_the_outage() -> None:
    trying = outage(timeout_s=10.0)
    pauses(trying, 7)

    trying.end()

    assert trying.pause_s(50.0) == 0.0
    assert fail(trying, 1000.0) == [False]
    assert trying.pause_s(1000.0) == pytest.approx(0.05)


def test_outage_ends_with_its_deadline() -> None:
    assert fail(outage(timeout_s=10.0), 50.0, 59.99, 60.0) == [False, False, True]


def test_no_pause_goes_beyond_the_deadline() -> None:
    trying = outage(timeout_s=0.5)
    pauses(trying, 4)

    fail(trying, 50.49)

    assert trying.pause_s(50.49) == pytest.approx(0.01)
