"""The store's clock, judged by our own: read by hand, in seconds."""

from __future__ import annotations

from turnstream_server.batcher.planner.timekeeper import SteadyClock


def read(clock: SteadyClock, *, server_s: float, now_s: float) -> float:
    """For how long the clock is steady."""
    return round(clock.read(server_ms=round(server_s * 1000), now_s=now_s).steady_s, 6)


def test_a_clock_that_is_read_often_is_steady_since_the_first_time() -> None:
    clock = SteadyClock(tolerance_s=1.0)

    steady_s = [read(clock, server_s=5000 + second / 2, now_s=second / 2) for second in range(5)]

    assert steady_s == [0, 0.5, 1.0, 1.5, 2.0]


def test_silence_longer_than_the_tolerance_restarts_the_clock() -> None:
    clock = SteadyClock(tolerance_s=1.0)
    read(clock, server_s=5000, now_s=0)

    within = read(clock, server_s=5001, now_s=1.0)
    beyond = read(clock, server_s=5002.1, now_s=2.1)
    after = read(clock, server_s=5002.6, now_s=2.6)

    assert (within, beyond, after) == (1.0, 0, 0.5)


def test_clock_jump_in_either_direction_restarts_the_clock() -> None:
    for jump_s in (3600, -3600):
        clock = SteadyClock(tolerance_s=1.0)
        read(clock, server_s=5000, now_s=0)
        read(clock, server_s=5000.5, now_s=0.5)

        jumped = read(clock, server_s=5001 + jump_s, now_s=1.0)
        after = read(clock, server_s=5001.5 + jump_s, now_s=1.5)

        assert (jumped, after) == (0, 0.5)


def test_small_jumps_add_up() -> None:
    clock = SteadyClock(tolerance_s=1.0)

    steady_s = [
        read(clock, server_s=5000 + 0.9 * second, now_s=0.5 * second) for second in range(6)
    ]

    assert steady_s == [0, 0.5, 1.0, 0, 0.5, 1.0]
