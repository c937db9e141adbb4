"""Room for what is on its way, in bytes, without a store."""

from __future__ import annotations

from redis.exceptions import ResponseError

from testkit.outboxes import OutboxDriver, driver_with_queue


def test_capacity_is_counted_in_bytes_and_one_write_always_fits() -> None:
    driver, queue = driver_with_queue(max_inflight_bytes=100)

    before = (
        driver.outbox.inflight.has_capacity_for_turn(10**9),
        driver.outbox.inflight.has_capacity_for_group(10**9),
    )
    driver.append(queue)
    during = (
        driver.outbox.inflight.has_capacity_for_turn(100),
        driver.outbox.inflight.has_capacity_for_group(100),
    )
    driver.answer(1)

    assert (before, during) == ((True, True), (False, False))
    assert driver.outbox.inflight.statistics().inflight_bytes == 0


def test_waiting_groups_take_no_space_from_open_trajectories() -> None:
    driver = OutboxDriver(max_inflight_bytes=100)
    (queue,) = driver.request()
    driver.append(queue)
    driver.answer(ResponseError("WAIT [7-0] no capacity"))

    waiting = (
        driver.outbox.inflight.has_capacity_for_turn(100),
        driver.outbox.inflight.has_capacity_for_group(100),
    )
    waiting_bytes = driver.outbox.inflight.statistics().inflight_bytes
    driver.outbox.admissions.woken()
    driver.answer([1])
    admitted = driver.outbox.inflight.has_capacity_for_turn(100)

    assert waiting == (True, False)
    assert not admitted
    assert driver.outbox.inflight.statistics().inflight_bytes == waiting_bytes > 0
