from __future__ import annotations

import pytest

from turnstream.generator.outbox.waits import Outage


def outage(timeout_s: float = 100.0, jitter: float = 1.0) -> Outage:
    return Outage(timeout_s, jitter=lambda: jitter, address="?")


def pauses(trying: Outage, num_failures: int) -> list[float]:
    """Fail as soon as another try may be made."""
    now_s = 50.0
    found = []
    for _ in range(num_failures):
        trying.failed("gone", now_s, since_s=now_s)
        found.append(trying.pause_s(now_s))
        now_s += found[-1]
    return found


def test_pauses_double_up_to_a_second_and_jitter_halves_them_at_most() -> None:
    assert pauses(outage(), 7) == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert pauses(outage(jitter=0.0), 2) == pytest.approx([0.025, 0.05])


def test_outage_ends_with_success_or_its_deadline() -> None:
    trying = outage(timeout_s=10.0)
    pauses(trying, 7)
    trying.end()
    assert trying.pause_s(50.0) == 0.0

    ended = [trying.failed("gone", now_s, since_s=now_s) for now_s in (1000.0, 1009.99, 1010.0)]

    assert ended == [False, False, True]
    assert trying.pause_s(1009.99) == pytest.approx(0.01)  # no pause goes beyond the deadline
