"""Trajectories from their first write to their end, without a store."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError, ResponseError

from testkit.runs.outboxes import OutboxDriver, driver_with_queue, driver_with_seal
from turnstream.errors import ConflictError, FencedError
from turnstream.generator.outbox.receipts import PendingWrite
from turnstream.generator.outbox.writes import MAX_DIRECT_BYTES, Round
from turnstream.store.client.keys import trajectory_keys
from turnstream.store.run.groups import FIRST_BYTES, with_block
from turnstream.types import TrajectoryKey


def test_turns_that_wait_travel_in_one_call_with_the_seal() -> None:
    driver, queue = driver_with_queue()
    receipts = [driver.append(queue), driver.append(queue)]
    end = driver.seal(queue)

    stored = driver.answer(3)
    was_done = end.is_done
    posted = driver.answer([b"OK"])

    assert (driver.script_names(stored), driver.record_counts(stored)) == (["append"], [3])
    assert [receipt.is_done for receipt in receipts] == [True, True]
    assert not was_done
    assert driver.script_names(posted) == ["post_sealed"]
    assert posted.commands[0].args[1] == f"1:/{queue.num_bytes + len(queue.seal_record)}:w"
    assert end.is_done


LOWER_ID = ResponseError("The ID specified in XADD is equal or smaller than the target stream")


def is_direct(sent: Round) -> bool:
    return any(words[0] == "XADD" for words in sent.words)


def test_later_turn_is_appended_by_one_command() -> None:
    driver = OutboxDriver()
    queue = driver.open_with_turn()
    receipt = driver.append(queue)

    sent = driver.answer(b"0-2")

    record = sent.commands[0].args[-1]
    turns = trajectory_keys("r", queue.trajectory_id).turns
    assert sent.words == [("XADD", turns, "NOMKSTREAM", "0-2", "r", record)]
    assert (receipt.is_done, receipt.errors, queue.num_acknowledged) == (True, {}, 2)


@pytest.mark.parametrize("answer", [None, LOWER_ID], ids=["no stream", "lower id"])
def test_later_turn_that_is_not_appended_is_decided_by_the_script(answer: Any) -> None:
    driver = OutboxDriver()
    queue = driver.open_with_turn()
    receipt = driver.append(queue)

    first = driver.answer(answer)
    was_done = receipt.is_done
    second = driver.answer(ResponseError("FENCED [released] the trajectory is finished"))

    assert (is_direct(first), is_direct(second), was_done) == (True, False, False)
    assert [type(error) for error in receipt.errors.values()] == [FencedError]


def test_later_turn_needs_the_script_on_a_new_connection() -> None:
    driver = OutboxDriver()
    queue = driver.open_with_turn()
    driver.append(queue)

    lost = driver.reconnect()
    again = driver.answer(0)
    driver.append(queue)

    assert is_direct(lost)
    assert not is_direct(again)
    assert is_direct(driver.take_round())


def test_full_store_gets_a_later_turn_directly_again() -> None:
    driver = OutboxDriver()
    queue = driver.open_with_turn()
    driver.append(queue)

    driver.answer(OutOfMemoryError("command not allowed"))
    driver.skip_pause()

    assert is_direct(driver.take_round())


@pytest.mark.parametrize("case", ["two turns", "seal", "adopted", "large"])
def test_other_later_turns_need_the_script(case: str) -> None:
    driver = OutboxDriver()
    queue = driver.open_with_turn()
    driver.append(queue)
    match case:
        case "two turns":
            driver.append(queue)
        case "seal":
            driver.seal(queue)
        case "adopted":
            queue.epoch = 2
        case _:
            queue.num_bytes = MAX_DIRECT_BYTES + 1
            queue.reserved_bytes = 1 << 30

    assert not is_direct(driver.take_round())


def test_seals_of_several_trajectories_travel_in_one_call() -> None:
    driver = OutboxDriver()
    queues = driver.open_queues(3)
    for queue in queues:
        driver.append(queue)
        driver.seal(queue)
    driver.answer(2, 2, 2)

    posted = driver.answer([b"OK", b"DUPLICATE", b"SURPLUS"])

    assert driver.script_names(posted) == ["post_sealed"]
    assert driver.outbox.inflight.statistics().num_trajectories == 3


def test_each_conflict_is_recorded_until_it_is_answered() -> None:
    driver = OutboxDriver()
    for queue in driver.open_queues(2):
        driver.append(queue)
    conflict = ResponseError("CONFLICT turn 0 has another content")

    driver.answer(conflict, conflict)
    lost = driver.reconnect()
    again = driver.answer(1, 1)

    assert driver.script_names(again) == ["note_conflict", "note_conflict"]
    assert again.commands[0].args == ("g/0/0", "turn 0 has another content")
    assert again.commands == lost.commands
    assert driver.take() is None


def test_a_refusal_stops_one_trajectory_and_no_other() -> None:
    driver = OutboxDriver()
    one, other = driver.open_queues(2)
    receipts = [driver.append(one), driver.append(one), driver.append(other)]

    driver.answer(ResponseError("CONFLICT turn 0 has another content"), 1)

    assert [list(receipt.errors.values()) != [] for receipt in receipts] == [True, True, False]
    with pytest.raises(ConflictError):
        driver.append(one)
    assert not driver.append(other).is_done


def test_an_abandon_follows_the_turns_that_were_accepted() -> None:
    driver, queue = driver_with_queue()
    receipt = driver.append(queue)
    end = PendingWrite()
    driver.outbox.abandon(queue, "bored", end=end)

    sent = [driver.script_names(driver.answer(1)), driver.script_names(driver.answer(1))]

    assert sent == [["append"], ["abandon"]]
    assert receipt.is_done
    assert end.is_done


@pytest.mark.parametrize(
    ("tombstone", "num_lost"),
    [
        ("[released] the trajectory is finished, and its payload released", 0),
        ("the trajectory was abandoned, and its payload released", 1),
        ("the trajectory was never opened, or is released", 1),
    ],
)
@pytest.mark.parametrize(
    "opening",
    [
        ResponseError("CONFLICT [name] group g is finished: a name is used once"),
        [b"CONFLICT [group] group g is already planned"],
    ],
    ids=["over", "planned"],
)
def test_payload_decides_whether_a_released_group_lost_the_trajectory(
    opening: Any, tombstone: str, num_lost: int
) -> None:
    # A store lost a seal, and gave the trajectory up while its generator slept, or its group went
    # on. When that sent it again, this was taken for the end of all that had been sealed.
    driver, _, _ = driver_with_seal(keep_s=5.0)
    driver.answer([b"OK"])

    driver.restart()
    asked = driver.answer(opening, b"OK")
    sent = driver.answer(ResponseError(f"FENCED {tombstone}"))

    assert (driver.script_names(asked)[0], driver.script_names(sent)) == ("open_group", ["append"])
    assert len(driver.outbox.take_losses()) == num_lost


def test_turns_whose_seal_was_found_posted_are_kept_for_the_next_restart() -> None:
    # The answer to a posted seal was lost. When the store that came back said that the trajectory
    # was sealed, its turns were kept no longer, and the next restart cost them.
    driver, _, _ = driver_with_seal(keep_s=5.0)
    driver.reconnect()
    driver.answer()
    driver.answer([b"CONFLICT [sealed] g/0/0 is already sealed"])
    driver.answer([b"DUPLICATE"])

    driver.restart()
    driver.answer([1], b"OK")

    assert driver.record_counts(driver.answer(2)) == [2]


def test_finished_group_is_opened_first_after_every_restart() -> None:
    # After the second restart only the payload was asked.
    driver, _, _ = driver_with_seal(keep_s=5.0)
    driver.answer([b"OK"])
    asked: list[list[str]] = []

    for num_closings in (1, 2):
        driver.restart()
        over = ResponseError("CONFLICT [name] group g is finished: a name is used once")
        asked.append(driver.script_names(driver.answer(over, *[b"OK"] * num_closings)))
        driver.answer(
            ResponseError("FENCED [released] the trajectory is finished, and its payload released")
        )

    assert [each[0] for each in asked] == ["open_group", "open_group"]
    assert driver.outbox.take_losses() == []


NEVER_OR_OVER = b"FENCED [unknown] g/0/0 was never opened, or is finished"


def test_released_seal_is_known_if_its_payload_is_finished() -> None:
    # The answer to the first post was lost, and the run went on: trained, released, folded.
    driver, _, end = driver_with_seal()

    driver.answer([NEVER_OR_OVER])
    was_done = end.is_done
    asked = driver.answer(
        ResponseError("FENCED [released] the trajectory is finished, and its payload released")
    )

    assert not was_done
    assert (driver.script_names(asked), driver.record_counts(asked)) == (["append"], [1])
    assert (end.is_done, end.errors) == (True, {})
    assert driver.outbox.inflight.statistics().num_trajectories == 1
    assert driver.outbox.is_idle


@pytest.mark.parametrize(
    "answers",
    [
        [
            [NEVER_OR_OVER],
            ResponseError("FENCED the trajectory was abandoned, and its payload released"),
        ],
        [[NEVER_OR_OVER], ResponseError("FENCED the trajectory was never opened, or is released")],
        [[NEVER_OR_OVER], 0, [NEVER_OR_OVER]],
        [[b"FENCED g/0/0 is being written by x"]],
    ],
    ids=["abandoned", "unknown", "asked once", "other writer"],
)
def test_unknown_seal_is_refused_by_its_payload(answers: list[Any]) -> None:
    driver, _, end = driver_with_seal()

    for answer in answers:
        driver.answer(answer)

    assert [type(error) for error in end.errors.values()] == [FencedError]
    assert driver.outbox.is_idle


def test_bytes_are_reserved_in_blocks_as_a_trajectory_grows() -> None:
    driver, queue = driver_with_queue()
    rounds = []

    for _ in range(12):
        driver.append(queue, response="B" * 1_000)
        rounds.append(driver.answer(1))

    assert [sent.commands[0].args[0] for sent in rounds[:2]] == ["1:w", "1/w"]
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


@pytest.mark.parametrize("num_turns", [1, 2])
def test_whole_trajectory_reserves_its_size_unless_its_seal_is_sent(num_turns: int) -> None:
    driver = OutboxDriver()
    (queue,) = driver.request()
    for _ in range(num_turns):
        driver.append(queue, response="B" * 200_000)
    driver.seal(queue)
    driver.answer([1])

    sent = driver.take_round()

    is_sealed = queue.seal_record in sent.commands[0].args
    assert is_sealed == (num_turns == 1)
    assert driver.reservations(sent) == ([] if is_sealed else [("g/0/0", queue.num_bytes)])


def test_stored_turns_of_an_adopted_trajectory_are_reserved_too() -> None:
    driver = OutboxDriver()
    key, num_bytes = TrajectoryKey("g", sample=0), 10 * FIRST_BYTES

    driver.outbox.tracker.adopt(key, epoch=4, num_turns=2, num_bytes=num_bytes, now_s=driver.now_s)

    ((name, asked),) = driver.reservations(driver.answer())
    assert (name, asked) == ("g/0/0", with_block(num_bytes))
