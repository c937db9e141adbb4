"""Trajectories from their first write to their end, without a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ResponseError

from turnstream.errors import ConflictError, FencedError
from turnstream.generator.outbox.receipts import Delivery
from turnstream.types import GroupOpened, TrajectoryKey

NewDesk = Callable[..., Any]
KEYS = [TrajectoryKey("g", sample) for sample in range(3)]


def test_turns_that_wait_travel_in_one_call_with_the_seal(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    receipts = [desk.append(lane), desk.append(lane)]
    end = desk.seal(lane)

    stored = desk.answer(3)
    was_done = end.is_done
    posted = desk.answer([b"OK"])

    assert (desk.said(stored), desk.records(stored)) == (["append"], [3])
    assert [receipt.is_done for receipt in receipts] == [True, True]
    assert not was_done
    assert desk.said(posted) == ["post_sealed"]
    assert end.is_done


def test_only_the_first_call_of_a_trajectory_makes_its_place(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened()

    leases = []
    for _ in range(3):
        desk.append(lane)
        leases.append(desk.answer(1).commands[0].args[:2])

    assert leases == [("1:w", 0), ("1/w", 1), ("1/w", 2)]


def test_seals_of_several_trajectories_travel_in_one_call(new_desk: NewDesk) -> None:
    desk = new_desk()
    lanes = desk.opened(3)
    for lane in lanes:
        desk.append(lane)
        desk.seal(lane)
    desk.answer(2, 2, 2)

    posted = desk.answer([b"OK", b"DUPLICATE", b"SURPLUS"])

    assert desk.said(posted) == ["post_sealed"]
    assert desk.outbox.inflight.statistics().num_trajectories == 3


def test_a_seal_is_posted_only_after_its_payload_was_acknowledged(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    desk.append(lane)
    desk.seal(lane)

    desk.lose()
    desk.wait_out()

    assert desk.said(desk.answer(2)) == ["append"]
    assert desk.said(desk.answer([b"OK"])) == ["post_sealed"]


def test_conflict_with_a_lost_answer_is_recorded_once(
    new_desk: NewDesk,
) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    desk.append(lane)

    desk.answer(ResponseError("CONFLICT turn 0 has another content"))
    told = desk.take()
    assert told is not None
    desk.outbox.lost(told, error=ConnectionError("gone"), now_s=desk.now_s)
    desk.wait_out()
    again = desk.answer(1)

    assert told.commands[0].args[:2] == ("g/0/0", "turn 0 has another content")
    assert again.commands == told.commands
    assert desk.take() is None


def test_two_conflicts_are_recorded_as_two(new_desk: NewDesk) -> None:
    desk = new_desk()
    for lane in desk.opened(2):
        desk.append(lane)
    conflict = ResponseError("CONFLICT turn 0 has another content")

    desk.answer(conflict, conflict)
    told = desk.answer(1, 1)

    assert desk.said(told) == ["note_conflict", "note_conflict"]
    assert len({command.args[-1] for command in told.commands}) == 2


def test_a_refusal_stops_one_trajectory_and_no_other(new_desk: NewDesk) -> None:
    desk = new_desk()
    one, other = desk.opened(2)
    receipts = [desk.append(one), desk.append(one), desk.append(other)]

    desk.answer(ResponseError("CONFLICT turn 0 has another content"), 1)

    assert [list(receipt.errors.values()) != [] for receipt in receipts] == [True, True, False]
    with pytest.raises(ConflictError):
        desk.append(one)
    assert not desk.append(other).is_done


def test_an_abandon_follows_the_turns_that_were_accepted(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    receipt = desk.append(lane)
    end = Delivery()
    desk.outbox.abandon(lane, "bored", end=end)

    sent = [desk.said(desk.answer(1)), desk.said(desk.answer(1))]

    assert sent == [["append"], ["abandon"]]
    assert receipt.is_done
    assert end.is_done


def test_adopted_trajectory_continues_after_its_stored_turns(new_desk: NewDesk) -> None:
    desk = new_desk()
    lane = desk.outbox.adopt(KEYS[0], epoch=4, num_turns=2, num_bytes=0, now_s=desk.now_s)
    desk.append(lane)

    sent = desk.answer(1)
    desk.wait_out()
    beat = desk.answer()

    assert sent.commands[0].args[:3] == ("4/w", 2, 0)
    assert beat.commands[0].args == ("g/0/0", "4:w")


def test_trajectory_opened_by_a_task_has_its_lease_renewed(new_desk: NewDesk) -> None:
    desk = new_desk()
    group = GroupOpened(group_id="g", prompt_uid="", num_samples=2)

    desk.outbox.adopt_opened(group, {KEYS[0]: 3, KEYS[1]: 5}, now_s=desk.now_s)

    assert desk.outbox.num_open == 2


@pytest.mark.parametrize(
    ("tombstone", "num_lost"),
    [
        ("[released] the trajectory is finished, and its payload released", 0),
        ("the trajectory was given up, and its payload released", 1),
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
    new_desk: NewDesk, opening: Any, tombstone: str, num_lost: int
) -> None:
    # A store lost a seal, and gave the trajectory up while its generator slept, or its group went
    # on. When that sent it again, this was taken for the end of all that had been sealed.
    desk = new_desk(keep_s=5.0)
    (lane,) = desk.opened()
    desk.append(lane)
    desk.seal(lane)
    desk.answer(2)
    desk.answer([b"OK"])
    desk.outbox.close_run("", Delivery())

    desk.lose()
    desk.wait_out()
    desk.answer()
    asked = desk.answer(opening, b"OK")
    sent = desk.answer(ResponseError(f"FENCED {tombstone}"))

    assert (desk.said(asked)[0], desk.said(sent)) == ("open_group", ["append"])
    assert len(desk.outbox.take_losses()) == num_lost


def test_turns_whose_seal_was_found_posted_are_kept_for_the_next_restart(
    new_desk: NewDesk,
) -> None:
    # The answer to a posted seal was lost. When the store that came back said that the trajectory
    # was sealed, its turns were kept no longer, and the next restart cost them.
    desk = new_desk(keep_s=5.0)
    (lane,) = desk.opened()
    desk.append(lane)
    desk.seal(lane)
    desk.answer(2)
    desk.lose()
    desk.wait_out()
    desk.answer()
    desk.answer([b"CONFLICT [sealed] g/0/0 is already sealed"])
    desk.answer([b"DUPLICATE"])

    desk.outbox.close_run("", Delivery())
    desk.lose()
    desk.wait_out()
    desk.answer()
    desk.answer([1], b"OK")

    assert desk.records(desk.answer(2)) == [2]


def test_a_group_that_was_over_is_asked_for_first_after_every_restart(new_desk: NewDesk) -> None:
    # After the second restart only the payload was asked.
    desk = new_desk(keep_s=5.0)
    (lane,) = desk.opened()
    desk.append(lane)
    desk.seal(lane)
    desk.answer(2)
    desk.answer([b"OK"])
    asked: list[list[str]] = []

    for num_closings in (1, 2):
        desk.outbox.close_run("", Delivery())
        desk.lose()
        desk.wait_out()
        desk.answer()
        over = ResponseError("CONFLICT [name] group g is finished: a name is used once")
        asked.append(desk.said(desk.answer(over, *[b"OK"] * num_closings)))
        desk.answer(
            ResponseError("FENCED [released] the trajectory is finished, and its payload released")
        )

    assert [each[0] for each in asked] == ["open_group", "open_group"]
    assert desk.outbox.take_losses() == []


NEVER_OR_OVER = b"FENCED [unknown] g/0/0 was never opened, or is finished"


def test_released_seal_is_known_if_its_payload_is_finished(
    new_desk: NewDesk,
) -> None:
    # The answer to the first post was lost, and the run went on: trained, released, folded.
    desk, end = _sealed(new_desk)

    desk.answer([NEVER_OR_OVER])
    was_done = end.is_done
    asked = desk.answer(
        ResponseError("FENCED [released] the trajectory is finished, and its payload released")
    )

    assert not was_done
    assert (desk.said(asked), desk.records(asked)) == (["append"], [1])
    assert (end.is_done, end.errors) == (True, {})
    assert desk.outbox.inflight.statistics().num_trajectories == 1
    assert desk.outbox.is_idle


@pytest.mark.parametrize(
    "said",
    [
        "FENCED the trajectory was given up, and its payload released",
        "FENCED the trajectory was never opened, or is released",
    ],
)
def test_a_seal_that_came_to_nothing_is_refused_by_its_payload(
    new_desk: NewDesk, said: str
) -> None:
    desk, end = _sealed(new_desk)

    desk.answer([NEVER_OR_OVER])
    desk.answer(ResponseError(said))

    assert [type(error) for error in end.errors.values()] == [FencedError]
    assert desk.outbox.is_idle


def test_a_payload_that_is_there_is_not_asked_again(new_desk: NewDesk) -> None:
    desk, end = _sealed(new_desk)

    desk.answer([NEVER_OR_OVER])
    desk.answer(0)
    desk.answer([NEVER_OR_OVER])

    assert [type(error) for error in end.errors.values()] == [FencedError]
    assert desk.outbox.is_idle


def _sealed(new_desk: NewDesk) -> tuple[Any, Delivery]:
    """A trajectory whose payload is stored; its seal is posted next."""
    desk = new_desk()
    (lane,) = desk.opened()
    desk.append(lane)
    end = desk.seal(lane)
    desk.answer(2)
    return desk, end
