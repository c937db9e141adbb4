"""Room for what trajectories outgrow, without a store: asked for in blocks."""

from __future__ import annotations

import pytest

from testkit.outboxes import OutboxDriver, driver_with_queue
from turnstream.store.run.budget import FIRST_BYTES, with_block
from turnstream.types import TrajectoryKey


def test_bytes_are_reserved_in_blocks_as_a_trajectory_grows() -> None:
    driver, queue = driver_with_queue()
    rounds = []

    for _ in range(12):
        driver.append(queue, response="B" * 1_000)
        rounds.append(driver.answer(1))

    size = queue.num_bytes // 12
    asked = [
        (number, *driver.reservations(sent)[0])
        for number, sent in enumerate(rounds)
        if driver.reservations(sent)
    ]
    first, second = FIRST_BYTES // size, (2 * (FIRST_BYTES // size + 1) * size) // size
    assert [number for number, _, _ in asked] == [first, second]
    assert [name for _, name, _ in asked] == ["g/0/0", "g/0/0"]
    assert asked[0][2] == pytest.approx(2 * (first + 1) * size, abs=8_000)


def test_reservation_is_repeated_after_a_lost_connection() -> None:
    driver, queue = driver_with_queue()
    driver.append(queue, response="B" * 5_000)

    lost = driver.reconnect()
    again = driver.take_round()

    assert driver.reservations(again) == driver.reservations(lost) != []


def test_whole_trajectory_reserves_its_exact_size() -> None:
    driver = OutboxDriver()
    (queue,) = driver.request()
    driver.append(queue, response="B" * 5_000)
    driver.seal(queue)
    driver.answer([1])

    sent = driver.answer(2)

    assert driver.reservations(sent) == [("g/0/0", queue.num_bytes)]


def test_the_seal_says_how_many_bytes_are_stored() -> None:
    driver, queue = driver_with_queue()
    driver.append(queue)
    driver.seal(queue)
    driver.answer(2)

    posted = driver.answer([b"OK"])

    assert posted.commands[0].args[1] == f"1:/{queue.num_bytes + len(queue.seal_record)}:w"


def test_stored_turns_of_an_adopted_trajectory_are_reserved_too() -> None:
    driver = OutboxDriver()
    key, num_bytes = TrajectoryKey("g", sample=0), 10 * FIRST_BYTES

    driver.outbox.tracker.adopt(key, epoch=4, num_turns=2, num_bytes=num_bytes, now_s=driver.now_s)

    ((name, asked),) = driver.reservations(driver.answer())
    assert (name, asked) == ("g/0/0", with_block(num_bytes))
