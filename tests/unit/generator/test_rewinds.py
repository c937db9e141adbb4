"""Trajectories that are sent again to a store that may have lost them, without a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ResponseError

from turnstream.errors import ConflictError, FencedError, StoreBehindError, StoreUnavailableError
from turnstream.generator.outbox.receipts import Delivery
from turnstream.generator.outbox.trajectory_queue import Lane, RewardPost
from turnstream.store.run.rewards import reward_command
from turnstream.types import GroupOpened, TrajectoryKey

NewDesk = Callable[..., Any]


def come_back(desk: Any) -> None:
    """Another round is lost, and who answers may be another start of the store."""
    if desk.outbox.is_idle:
        desk.outbox.close_run("", Delivery())
    desk.lose()
    desk.wait_out()
    desk.answer()


def meet(desk: Any, run_id: bytes) -> None:
    """A new connection is made, and the store says which it is, and takes what is sent to it."""
    sent = desk.take()
    settings = [b"appendfsync", b"everysec"]
    replies = [*[b"sha"] * (sent.num_replies - 2), b"run_id:" + run_id, settings]
    desk.outbox.answered(sent, replies=replies, now_s=desk.now_s)


def errors(delivery: Delivery) -> list[type[Exception]]:
    return [type(error) for error in delivery.errors.values()]


@pytest.fixture
def sealed(new_desk: NewDesk) -> Callable[[], tuple[Any, Lane, Delivery]]:
    """Makes a desk with a trajectory whose seal is stored, and posted next."""

    def make() -> tuple[Any, Lane, Delivery]:
        desk = new_desk(keep_s=5.0)
        (lane,) = desk.opened()
        desk.append(lane)
        end = desk.seal(lane)
        desk.answer(2)
        return desk, lane, end

    return make


def test_trajectory_ended_by_another_before_it_opened_is_refused(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.asked()
    receipt, end = desk.append(lane), desk.seal(lane)

    sent = desk.take()
    replies = [*[b"sha"] * (sent.num_replies - 2), [b"appendfsync", b"everysec"]]
    answer = [b"CONFLICT [sealed] g/0/0 is already sealed"]
    desk.outbox.answered(sent, replies=[*replies, answer], now_s=desk.now_s)

    assert (errors(receipt), errors(end)) == ([ConflictError], [ConflictError])
    assert desk.outbox.is_idle


def test_trajectory_written_by_another_is_refused_if_its_seal_was_stored(sealed: Any) -> None:
    desk, _, end = sealed()

    come_back(desk)
    desk.answer([b"CONFLICT g/0/0 is being written by x"])

    assert errors(end) == [ConflictError]
    assert desk.outbox.is_idle


def test_resent_turns_are_counted_only_as_resent(sealed: Any) -> None:
    desk, lane, _ = sealed()
    desk.answer([b"OK"])
    before = desk.outbox.inflight.statistics()

    come_back(desk)
    desk.answer([1], b"OK")
    held = desk.outbox.inflight.statistics().inflight_bytes
    desk.answer(0)
    desk.answer([b"DUPLICATE"])

    after = desk.outbox.inflight.statistics()
    assert (before.num_trajectories, after.num_trajectories) == (1, 1)
    assert (before.num_turns, after.num_turns) == (1, 1)
    assert (after.num_resent, after.num_duplicates, after.inflight_bytes, held) == (1, 2, 0, 0)
    assert after.num_restarts == 1
    assert lane.num_acknowledged == 1


def test_a_seal_is_sent_again_after_its_turns_were_proven(new_desk: NewDesk) -> None:
    desk = new_desk(keep_s=5.0)
    lane = desk.stored()
    desk.now_s += 6.0
    desk.seal(lane)
    desk.answer(1)

    come_back(desk)
    again = desk.answer(1)

    assert (desk.said(again)[0], desk.records(again)) == ("append", [1])
    assert again.commands[0].args[1:3] == (1, 1)


def test_ended_trajectory_is_lost_if_the_store_stays_away(sealed: Any) -> None:
    desk, _, end = sealed()
    desk.answer([b"OK"])

    come_back(desk)
    desk.outbox.fail_all(StoreUnavailableError("away"))

    (lost,) = desk.outbox.take_losses()
    assert isinstance(lost, StoreBehindError)
    assert "g/0/0 was acknowledged" in str(lost)
    assert errors(end) == []  # it was told long ago


def test_lost_turns_that_are_no_longer_kept_are_named(
    new_desk: NewDesk,
) -> None:
    desk = new_desk()
    lane = desk.stored()
    desk.append(lane)

    desk.answer(ResponseError("GAP [0] the next turn is 0"))

    with pytest.raises(StoreBehindError, match="came back without turn 0, which"):
        desk.append(lane)


def test_seal_refused_for_another_reason_does_not_ask_its_payload(
    sealed: Any,
) -> None:
    desk, _, end = sealed()

    desk.answer([b"FENCED g/0/0 is being written by x"])

    assert errors(end) == [FencedError]
    assert desk.outbox.is_idle


def test_turns_of_a_finished_trajectory_are_refused(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    receipt = desk.append(lane)

    desk.answer(
        ResponseError("FENCED [released] the trajectory is finished, and its payload released")
    )

    assert errors(receipt) == [FencedError]


def test_missing_turns_of_an_ended_trajectory_are_named(sealed: Any) -> None:
    desk, _, _ = sealed()
    desk.answer([b"OK"])

    come_back(desk)
    desk.answer([1], b"OK")
    desk.answer(ResponseError("GAP [0] the next turn is 0"))

    (lost,) = desk.outbox.take_losses()
    assert str(lost).startswith("g/0/0: the store came back without ")
    assert desk.outbox.inflight.statistics().inflight_bytes == 0
    assert desk.outbox.inflight.statistics().num_lost == 1


def test_only_what_had_ended_is_a_loss(new_desk: NewDesk) -> None:
    desk = new_desk(keep_s=5.0)
    given_up, refused = desk.opened(2)
    desk.outbox.abandon(given_up, "bored", end=Delivery())
    desk.answer(1)
    receipt = desk.append(refused)

    come_back(desk)
    desk.answer([b"CONFLICT g/0/0 is being written by x", b"CONFLICT g/1/0 is being written by x"])

    assert errors(receipt) == [ConflictError]
    assert desk.outbox.take_losses() == []


def test_adopted_trajectory_is_adopted_again(new_desk: NewDesk) -> None:
    desk = new_desk(keep_s=5.0)
    desk.opened()
    key = TrajectoryKey("g", sample=1)
    desk.outbox.adopt(key, epoch=4, num_turns=2, num_bytes=0, now_s=desk.now_s)

    come_back(desk)

    assert "take_over" in desk.said(desk.take())


def test_no_lease_is_renewed_before_the_group_is_open_again(new_desk: NewDesk) -> None:
    desk = new_desk(keep_s=5.0)
    desk.stored()

    come_back(desk)
    before = desk.outbox.num_open
    desk.answer([1], b"OK")

    assert (before, desk.outbox.num_open) == (0, 1)


def test_leases_and_bytes_of_a_known_group_are_renewed_at_once(new_desk: NewDesk) -> None:
    desk = new_desk(keep_s=5.0)
    (lane,) = desk.opened()
    desk.append(lane, response="B" * 5_000)
    desk.answer(1)
    desk.now_s += 6.0
    desk.append(lane)
    desk.answer(1)

    come_back(desk)
    again = desk.take()

    assert "heartbeat" in desk.said(again)
    assert [name for name, _ in desk.reserved(again)] == ["g/0/0"]


def test_twice_surviving_trajectory_is_resent_from_its_first_turn(sealed: Any) -> None:
    desk, lane, _ = sealed()
    desk.answer([b"OK"])

    come_back(desk)
    desk.answer([b"CONFLICT [planned] g/0/0 is already planned"], b"OK")
    acknowledged = lane.num_acknowledged
    come_back(desk)
    asked = desk.answer([1], b"OK", b"OK")
    again = desk.answer(2)

    assert (acknowledged, desk.said(asked)[0]) == (1, "open_group")
    assert (again.commands[0].args[1], desk.records(again)) == (0, [2])


def test_a_seal_that_goes_again_has_the_same_bytes(new_desk: NewDesk) -> None:
    desk = new_desk(keep_s=5.0)
    (lane,) = desk.opened()
    desk.append(lane)
    desk.seal(lane)
    first = desk.answer(2)
    desk.answer([b"OK"])

    come_back(desk)
    desk.answer([2], b"OK")  # the epoch of another lease
    again = desk.answer(2)

    assert again.commands[0].args[0].startswith("2:")
    assert again.commands[0].args[-1] == first.commands[0].args[-1]


def test_a_seal_that_was_posted_late_is_posted_again(sealed: Any) -> None:
    desk, _, _ = sealed()
    desk.now_s += 6.0
    desk.answer([b"OK"])

    come_back(desk)

    assert desk.said(desk.answer(0, b"OK"))[0] == "append"
    assert desk.said(desk.answer([b"DUPLICATE"])) == ["post_sealed"]


def test_ended_trajectory_that_is_not_resent_is_no_loss(sealed: Any) -> None:
    desk, _, end = sealed()
    desk.answer([b"OK"])

    desk.outbox.fail_all(StoreUnavailableError("away"))

    assert (desk.outbox.take_losses(), errors(end)) == ([], [])


def test_trajectory_with_an_unposted_seal_fails_with_the_others(sealed: Any) -> None:
    desk, _, end = sealed()

    desk.outbox.fail_all(StoreUnavailableError("away"))

    assert errors(end) == [StoreUnavailableError]


def test_ended_trajectory_is_a_loss_until_its_seal_is_posted_again(sealed: Any) -> None:
    desk, _, _ = sealed()
    desk.answer([b"OK"])

    come_back(desk)
    desk.answer([1], b"OK")
    desk.answer(0)
    desk.outbox.fail_all(StoreUnavailableError("away"))

    assert len(desk.outbox.take_losses()) == 1


def test_waiting_trajectory_without_writes_fails_with_the_others(
    new_desk: NewDesk,
) -> None:
    desk = new_desk()
    (lane,) = desk.asked()

    desk.outbox.fail_all(StoreUnavailableError("away"))

    with pytest.raises(StoreUnavailableError):
        desk.append(lane)


def test_failed_trajectory_reserves_nothing(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    desk.append(lane, response="B" * 10_000)

    desk.outbox.fail_all(StoreUnavailableError("away"))

    assert desk.take() is None


def test_lost_group_waits_for_admission_without_a_deadline(sealed: Any) -> None:
    # It was lost when the wait for leave of a new group would have ended.
    desk, _, end = sealed()
    come_back(desk)
    desk.answer(ResponseError("WAIT [7-0] no capacity"))

    desk.now_s += 10 * desk.outbox.admission_timeout_s
    asked = desk.answer(ResponseError("ERR no answer to that"))
    desk.outbox.woken()
    opened = desk.answer([1])
    payload = desk.answer(2)

    assert (desk.said(asked), desk.said(opened), desk.said(payload)) == (
        ["read_waits"],
        ["open_group"],
        ["append"],
    )
    assert (opened.commands[0].args[1], errors(end)) == ("3+", [])


@pytest.mark.parametrize(
    ("first", "second", "num_lost"),
    [("OK", "OK", 0), ("OK", "DUPLICATE", 0), ("OK", "LATE", 1), ("LATE", "LATE", 0)],
)
def test_late_answer_to_a_repeated_reward_is_reported_as_lost(
    new_desk: NewDesk, first: str, second: str, num_lost: int
) -> None:
    desk = new_desk(keep_s=5.0)
    command = reward_command("r", TrajectoryKey("g", 7), 1.0, None)
    desk.outbox.post_reward(RewardPost(command, Delivery()))
    desk.answer(first.encode())
    desk.asked()

    come_back(desk)
    sent = desk.answer([1], second.encode())
    assert desk.said(sent) == ["open_group", "post_reward"]

    losses = [str(error) for error in desk.outbox.take_losses()]
    said = "a reward was acknowledged, and the store lost it: the group of g/7/0 went on without it"
    assert losses == [said] * num_lost


def test_task_written_here_is_not_granted_again_until_it_failed(
    new_desk: NewDesk,
) -> None:
    # Nothing is kept of it, as after a long episode, and its lease is held all the same.
    desk = new_desk(keep_s=0)
    group = GroupOpened(group_id="g", prompt_uid="", num_samples=1)
    epochs = {TrajectoryKey("g", 0): 3}
    (lane,) = desk.outbox.adopt_opened(group, epochs, now_s=desk.now_s)

    again = desk.outbox.adopt_opened(group, epochs, now_s=desk.now_s)
    desk.append(lane)
    desk.outbox.fail_all(StoreUnavailableError("away"))
    since = desk.outbox.adopt_opened(group, epochs, now_s=desk.now_s)

    assert (again, len(since)) == ([], 1)


@pytest.mark.parametrize(("second", "num_restarts"), [(b"first", 0), (b"other", 1)])
def test_restart_is_counted_only_if_another_server_answers(
    new_desk: NewDesk, second: bytes, num_restarts: int
) -> None:
    # A task is taken over another connection: its leases are held before the store has said which.
    desk = new_desk(keep_s=5.0)
    group = GroupOpened(group_id="g", prompt_uid="", num_samples=1)
    desk.outbox.adopt_opened(group, {TrajectoryKey("g", 0): 3}, now_s=desk.now_s)

    meet(desk, b"first")
    desk.answer([3])
    desk.outbox.close_run("", Delivery())
    desk.lose()
    desk.wait_out()
    meet(desk, second)

    assert desk.outbox.inflight.statistics().num_restarts == num_restarts
