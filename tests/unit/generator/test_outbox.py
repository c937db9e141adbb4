"""The outbox without a store: rounds are taken, and answered by hand."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    ExecAbortError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ResponseError,
)

from turnstream.errors import (
    ConflictError,
    FencedError,
    NotReadyError,
    RunNotFoundError,
    StoreUnavailableError,
)
from turnstream.generator.calls import (
    SCRIPTS,
    Call,
    HeartbeatCall,
    NoteCall,
    ReserveCall,
    Round,
)
from turnstream.generator.drafts import TrajectoryDraft
from turnstream.generator.heartbeats import Heartbeats
from turnstream.generator.lanes import Lane
from turnstream.generator.outbox import Outbox
from turnstream.generator.receipts import Delivery
from turnstream.store.budget import FIRST_BYTES
from turnstream.store.keys import TrajectoryKeys
from turnstream.testing import turn
from turnstream.types import GroupOpened, Status, TrajectoryKey

OOM = OutOfMemoryError("command not allowed")
KEYS = [TrajectoryKey("g", sample) for sample in range(3)]


class Desk:
    """An outbox, a clock, and a hand that answers."""

    def __init__(self, **limits: Any) -> None:
        defaults = {
            "max_inflight_bytes": 1 << 20,
            "timeout_s": 10.0,
            "admission_timeout_s": 60.0,
            "keep_s": 0,
        }
        self.outbox = Outbox("r", "w", jitter=lambda: 1.0, **{**defaults, **limits})
        self.now_s = 100.0
        self.drafts = {key: TrajectoryDraft(key) for key in KEYS}

    def opened(self, num_lanes: int = 1, *, sync: Any = "everysec") -> list[Lane]:
        """Lanes that the store has admitted, and `appendfsync` as it says."""
        lanes = self.asked(num_lanes)
        sent = self.take()
        assert sent is not None
        said = sync if isinstance(sync, Exception) else [b"appendfsync", sync.encode()]
        replies = [*[b"sha"] * (sent.num_replies - 2), said, [1] * num_lanes]
        self.outbox.answered(sent, replies=replies, now_s=self.now_s)
        return lanes

    def answer_group(self, *queued: Any, executed: Any) -> Round:
        """Take a round that is one write, and answer it."""
        sent = self.take()
        assert sent is not None
        assert sent.is_grouped
        self.outbox.answered(sent, replies=[b"OK", *queued, executed], now_s=self.now_s)
        return sent

    def asked(self, num_lanes: int = 1, opened: Delivery | None = None) -> list[Lane]:
        """Lanes that ask for leave."""
        group = GroupOpened(group_id="g", prompt_uid="", num_samples=3)
        return self.outbox.admit(group, KEYS[:num_lanes], opened=opened)

    def append(self, lane: Lane, response: str = "B") -> Delivery:
        """Put a turn in."""
        receipt = Delivery()
        self.outbox.append(lane, self.drafts[lane.key].add(turn("a", response)), receipt)
        return receipt

    def seal(self, lane: Lane) -> Delivery:
        """Put the seal in."""
        end = Delivery()
        nothing: dict[str, Any] = dict.fromkeys(
            ("reward_components", "sampling", "tags", "metrics")
        )
        seal = self.drafts[lane.key].seal(reward=1.0, status=Status.COMPLETED, **nothing)
        self.outbox.seal(lane, seal, merged_tokens=2, end=end)
        return end

    def take(self) -> Round | None:
        """The next round."""
        return self.outbox.next_round(self.now_s)

    def answer(self, *answers: Any) -> Round:
        """Take a round and answer its calls; what is left over beside them is answered well."""
        sent = self.take()
        assert sent is not None
        loads = [b"sha"] * (sent.num_replies - len(sent.calls))
        beats = [
            _well(call)
            for call in sent.calls[len(answers) :]
            if isinstance(call, HeartbeatCall | NoteCall | ReserveCall)
        ]
        self.outbox.answered(sent, replies=[*loads, *answers, *beats], now_s=self.now_s)
        return sent

    def lose(self, error: Exception | None = None) -> Round:
        """Take a round and lose the connection."""
        sent = self.take()
        assert sent is not None
        self.outbox.lost(sent, error=error or RedisConnectionError("gone"), now_s=self.now_s)
        return sent

    def wait_out(self) -> None:
        """Let the pause pass."""
        self.now_s += self.outbox.pause_s(self.now_s) or 0.0


def _well(call: Call) -> Any:
    """What the store says to a call that is none of a trajectory's own."""
    if isinstance(call, HeartbeatCall):
        return [60_000, *[b"OK"] * len(call.lanes)]
    return call.sizes if isinstance(call, ReserveCall) else 1


def said(sent: Round) -> list[str]:
    """The scripts that a round calls."""
    return [command.script.name for command in sent.commands]


def records(sent: Round) -> list[int]:
    """How many records every append carries."""
    return [len(c.args) - 3 for c in sent.commands if c.script.name == "append"]


def test_turns_wait_until_their_trajectory_is_open() -> None:
    desk = Desk()
    (lane,) = desk.asked()
    desk.append(lane)

    first, second = desk.answer([1]), desk.answer(1)

    assert said(first) == ["open_group"]
    assert said(second) == ["append"]
    assert second.commands[0].args[0] == "1:w"
    assert desk.outbox.is_idle


def test_one_round_is_on_its_way_at_a_time() -> None:
    desk = Desk()
    (lane,) = desk.opened()
    desk.append(lane)

    taken = desk.take()
    desk.append(lane)

    assert taken is not None
    assert desk.take() is None
    assert not desk.outbox.is_idle


def test_turns_that_wait_travel_in_one_call_with_the_seal() -> None:
    desk = Desk()
    (lane,) = desk.opened()
    receipts = [desk.append(lane), desk.append(lane)]
    end = desk.seal(lane)

    stored = desk.answer(3)
    was_done = end.is_done
    posted = desk.answer([b"OK"])

    assert (said(stored), records(stored)) == (["append"], [3])
    assert [receipt.is_done for receipt in receipts] == [True, True]
    assert not was_done
    assert said(posted) == ["post_sealed"]
    assert end.is_done


def test_only_the_first_call_of_a_trajectory_makes_its_place() -> None:
    desk = Desk()
    (lane,) = desk.opened()

    leases = []
    for _ in range(3):
        desk.append(lane)
        leases.append(desk.answer(1).commands[0].args[:2])

    assert leases == [("1:w", 0), ("1/w", 1), ("1/w", 2)]


def test_seals_of_several_trajectories_travel_in_one_call() -> None:
    desk = Desk()
    lanes = desk.opened(3)
    for lane in lanes:
        desk.append(lane)
        desk.seal(lane)
    desk.answer(2, 2, 2)

    posted = desk.answer([b"OK", b"DUPLICATE", b"SURPLUS"])

    assert said(posted) == ["post_sealed"]
    assert desk.outbox.tally.statistics().num_trajectories == 3


def test_a_seal_is_posted_only_after_its_payload_was_acknowledged() -> None:
    desk = Desk()
    (lane,) = desk.opened()
    desk.append(lane)
    desk.seal(lane)

    desk.lose()
    desk.wait_out()

    assert said(desk.answer(2)) == ["append"]
    assert said(desk.answer([b"OK"])) == ["post_sealed"]


def test_what_was_lost_is_sent_again_first_and_in_order() -> None:
    desk = Desk()
    one, other, third = desk.opened(3)
    desk.append(one)
    desk.append(other)

    lost = desk.lose()
    desk.append(third)
    desk.append(one)
    desk.wait_out()
    again = desk.take()

    assert again is not None
    assert lost.commands[0].keys == again.commands[0].keys
    assert [c.keys for c in again.commands] == [lane.keys for lane in (one, other, third)]
    assert records(again) == [2, 1, 1]


def test_a_lost_connection_means_that_the_server_may_have_forgotten_the_scripts() -> None:
    desk = Desk()
    (lane,) = desk.opened()
    desk.append(lane)

    lost = desk.lose()
    desk.wait_out()
    again = desk.take()

    assert again is not None
    assert (lost.loads_scripts, again.loads_scripts) == (False, True)
    assert again.num_replies == len(SCRIPTS) + 2 + 1
    assert again.pack().count(b"LOAD") == len(SCRIPTS)
    assert again.pack().count(b"appendfsync") == 1


def test_a_script_that_is_unknown_is_loaded_at_once_but_not_for_ever() -> None:
    desk = Desk()
    (lane,) = desk.opened()
    desk.append(lane)

    desk.answer(NoScriptError("no script"))
    again = desk.answer(NoScriptError("no script"))

    assert again.loads_scripts
    assert desk.take() is None
    assert desk.outbox.pause_s(desk.now_s) == pytest.approx(0.02)


def test_a_full_server_is_left_alone_and_asked_again() -> None:
    desk = Desk()
    one, other = desk.opened(2)
    receipts = [desk.append(one), desk.append(other)]

    desk.answer(1, OOM)
    was_paused = desk.take() is None
    desk.wait_out()
    again = desk.answer(1)

    assert was_paused
    assert [c.keys for c in again.commands] == [other.keys]
    assert [receipt.is_done for receipt in receipts] == [True, True]
    assert desk.outbox.tally.statistics().num_retries == 1


@pytest.mark.parametrize(
    ("sync", "is_grouped"),
    [("always", True), ("everysec", False), ("no", False), (NoPermissionError("no CONFIG"), True)],
)
def test_a_round_is_one_write_where_the_store_may_sync_before_it_answers(
    sync: Any, is_grouped: bool
) -> None:
    desk = Desk()
    for lane in desk.opened(2, sync=sync):
        desk.append(lane)

    sent = desk.take()

    assert sent is not None
    assert sent.is_grouped == is_grouped
    assert (sent.pack().count(b"MULTI"), sent.pack().count(b"EXEC")) == (is_grouped, is_grouped)
    assert sent.num_replies == (4 if is_grouped else 2)


def test_a_round_of_one_call_needs_no_group() -> None:
    desk = Desk()
    (lane,) = desk.opened(sync="always")
    desk.append(lane)

    sent = desk.take()

    assert sent is not None
    assert not sent.is_grouped


def test_calls_of_one_write_are_answered_one_by_one() -> None:
    desk = Desk()
    one, other = desk.opened(2, sync="always")
    receipts = [desk.append(one), desk.append(other)]

    desk.answer_group(b"QUEUED", b"QUEUED", executed=[1, ResponseError("CONFLICT turn 0")])

    assert [receipt.is_done for receipt in receipts] == [True, True]
    assert one.error is None
    assert isinstance(other.error, ConflictError)


def test_a_full_server_that_refused_the_one_write_is_asked_call_by_call() -> None:
    desk = Desk()
    one, other, third = desk.opened(3, sync="always")
    desk.append(one)
    end = desk.seal(one)
    desk.answer(1)
    desk.append(other)
    desk.append(third)

    refused = desk.answer_group(b"QUEUED", OOM, OOM, executed=ExecAbortError("because of: OOM"))
    desk.wait_out()
    again = desk.take()

    assert said(refused) == ["post_sealed", "append", "append"]
    assert again is not None
    assert not again.is_grouped
    assert again.commands == refused.commands
    desk.outbox.answered(again, replies=[[b"OK"], OOM, OOM], now_s=desk.now_s)
    assert end.is_done
    desk.wait_out()
    desk.wait_out()
    still_full = desk.answer(OOM, OOM)
    desk.wait_out()
    emptied = desk.answer(1, 1)
    assert (still_full.is_grouped, emptied.is_grouped) == (False, False)
    desk.append(other)
    desk.append(third)
    assert desk.answer_group(b"QUEUED", b"QUEUED", executed=[1, 1]).is_grouped


def test_a_call_that_is_not_allowed_does_not_take_the_others_of_its_write_along() -> None:
    desk = Desk()
    one, other = desk.opened(2, sync="always")
    receipts = [desk.append(one), desk.append(other)]

    desk.answer_group(
        b"QUEUED", ResponseError("CONFLICT odd"), executed=ExecAbortError("previous errors")
    )
    desk.wait_out()
    desk.answer(1)

    assert [receipt.is_done for receipt in receipts] == [True, True]
    assert one.error is None
    assert isinstance(other.error, ConflictError)


def test_a_conflict_is_told_to_the_run_and_a_lost_answer_does_not_make_it_two() -> None:
    desk = Desk()
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


def test_what_a_full_server_refused_is_sent_again_in_order() -> None:
    desk = Desk()
    lanes = desk.opened(3)
    for lane in lanes:
        desk.append(lane)

    refused = desk.answer(OOM, OOM, OOM)
    desk.wait_out()
    again = desk.answer(1, 1, 1)

    assert again.commands == refused.commands


def test_nothing_accepted_fails_before_the_timeout() -> None:
    desk = Desk(timeout_s=10.0)
    (lane,) = desk.opened()
    receipt = desk.append(lane)

    while desk.now_s < 110.0:
        assert not receipt.is_done
        desk.answer(OOM)
        desk.wait_out()
    desk.answer(OOM)

    with pytest.raises(StoreUnavailableError, match="took no writes for 10 s: OOM"):
        receipt.raise_error()
    assert desk.outbox.is_idle
    assert desk.outbox.tally.has_room_for_group(1 << 20)


def test_a_refusal_stops_one_trajectory_and_no_other() -> None:
    desk = Desk()
    one, other = desk.opened(2)
    receipts = [desk.append(one), desk.append(one), desk.append(other)]

    desk.answer(ResponseError("CONFLICT turn 0 has another content"), 1)

    assert [list(receipt.errors.values()) != [] for receipt in receipts] == [True, True, False]
    with pytest.raises(ConflictError):
        desk.append(one)
    assert not desk.append(other).is_done


def test_a_group_that_must_wait_stands_aside_until_it_is_woken() -> None:
    desk = Desk()
    (lane,) = desk.opened()
    opened = Delivery()
    desk.asked(opened=opened)

    desk.answer(ResponseError("WAIT 7-0 no capacity"))
    desk.append(lane)
    payload = desk.answer(1)
    wake_id, nothing_to_send = desk.outbox.wake_id, desk.take() is None
    desk.outbox.woken()
    again = desk.answer([1])

    assert (wake_id, nothing_to_send) == ("7-0", True)
    assert (said(payload), said(again)) == (["append"], ["open_group"])
    assert opened.is_done
    assert desk.outbox.wake_id is None
    assert desk.outbox.tally.statistics().num_waits == 1


def test_the_oldest_wake_id_is_listened_from() -> None:
    desk = Desk()
    for wake_id in ("7-0", "9-0"):
        desk.asked()
        desk.answer(ResponseError(f"WAIT {wake_id} no capacity"))

    assert desk.outbox.wake_id == "7-0"


def test_a_wait_for_leave_ends_by_its_deadline() -> None:
    desk = Desk(admission_timeout_s=60.0)
    opened = Delivery()
    desk.asked(opened=opened)
    desk.answer(ResponseError("WAIT 7-0 the planner sleeps"))

    desk.wait_out()
    desk.take()

    assert desk.now_s == pytest.approx(160.0)
    with pytest.raises(NotReadyError, match="group g: no leave to start within 60 s: the planner"):
        opened.raise_error()


def test_a_group_given_up_while_it_waits_is_not_asked_for_again() -> None:
    desk = Desk()
    lanes = desk.asked(2)
    desk.answer(ResponseError("WAIT 7-0 no capacity"))
    ends = [Delivery(), Delivery()]

    for lane, end in zip(lanes, ends, strict=True):
        desk.outbox.abandon(lane, "bored", end=end)

    assert [end.is_done for end in ends] == [True, True]
    assert desk.outbox.is_idle


def test_a_group_given_up_while_it_asks_is_abandoned_once_it_is_open() -> None:
    desk = Desk()
    (lane,) = desk.asked()
    asking = desk.take()
    assert asking is not None
    desk.outbox.abandon(lane, "bored", end=Delivery())

    loads = [b"sha"] * (asking.num_replies - 1)
    desk.outbox.answered(asking, replies=[*loads, [1]], now_s=desk.now_s)

    assert said(desk.answer(1)) == ["abandon"]
    assert desk.outbox.is_idle


def test_an_abandon_follows_the_turns_that_were_accepted() -> None:
    desk = Desk()
    (lane,) = desk.opened()
    receipt = desk.append(lane)
    end = Delivery()
    desk.outbox.abandon(lane, "bored", end=end)

    sent = [said(desk.answer(1)), said(desk.answer(1))]

    assert sent == [["append"], ["abandon"]]
    assert receipt.is_done
    assert end.is_done


def test_a_round_is_bounded_but_takes_at_least_one_turn() -> None:
    desk = Desk(max_inflight_bytes=1 << 30)
    one, other = desk.opened(2)
    for _ in range(3):
        desk.append(one, response="B" * 200_000)
    desk.seal(one)
    desk.append(other)

    rounds = [desk.answer(1, 1), desk.answer(1), desk.answer(2)]

    assert [records(sent) for sent in rounds] == [[1, 1], [1], [2]]  # the seal comes last


def test_room_is_counted_in_bytes_and_there_is_always_some_for_one() -> None:
    desk = Desk(max_inflight_bytes=100)
    (lane,) = desk.opened()

    before = desk.outbox.tally.has_room_for_turn(10**9), desk.outbox.tally.has_room_for_group(10**9)
    desk.append(lane)
    during = desk.outbox.tally.has_room_for_turn(100), desk.outbox.tally.has_room_for_group(100)
    desk.answer(1)

    assert (before, during) == ((True, True), (False, False))
    assert desk.outbox.tally.statistics().inflight_bytes == 0


def test_what_waits_for_leave_takes_no_room_from_open_trajectories() -> None:
    desk = Desk(max_inflight_bytes=100)
    (lane,) = desk.asked()
    desk.append(lane)
    desk.answer(ResponseError("WAIT 7-0 no capacity"))

    waiting = desk.outbox.tally.has_room_for_turn(100), desk.outbox.tally.has_room_for_group(100)
    held_bytes = desk.outbox.tally.statistics().inflight_bytes
    desk.outbox.woken()
    desk.answer([1])
    admitted = desk.outbox.tally.has_room_for_turn(100)

    assert waiting == (True, False)
    assert not admitted
    assert desk.outbox.tally.statistics().inflight_bytes == held_bytes > 0


def test_giving_everything_up_settles_everything_but_leaves_live_trajectories_alone() -> None:
    desk = Desk()
    live, sending = desk.opened(2)
    receipt = desk.append(sending)
    sent = desk.take()
    opened, closing = Delivery(), Delivery()
    desk.asked(opened=opened)
    desk.outbox.close_run("", closing)

    desk.outbox.fail_all(StoreUnavailableError("enough"))
    assert sent is not None
    desk.outbox.answered(sent, replies=[1], now_s=desk.now_s)

    assert all(delivery.errors for delivery in (receipt, opened, closing))
    assert (live.error, desk.outbox.is_idle) == (None, True)


def test_leases_are_renewed_every_third_of_the_length_that_the_store_names() -> None:
    desk = Desk()
    lanes = desk.opened(2)

    sent: list[tuple[float, Any]] = []
    for _ in range(3):
        desk.wait_out()
        (beat,) = desk.answer([30_000, b"OK", b"OK"]).commands
        sent.append((round(desk.now_s - 100.0, 3), (beat.script.name, *beat.args)))

    both = ("heartbeat", "g/0/0", "1:w", "g/1/0", "1:w")
    assert sent == [(0.1, both), (10.1, both), (20.1, both)]
    assert [lane.error for lane in lanes] == [None, None]


def test_a_publisher_with_nothing_open_sends_no_heartbeat() -> None:
    desk = Desk()
    (lane,) = desk.opened()
    desk.append(lane)
    desk.seal(lane)
    desk.answer(2)
    desk.answer([b"OK"])

    desk.now_s += 1000

    assert desk.take() is None
    assert desk.outbox.pause_s(desk.now_s) is None


def test_a_heartbeat_on_its_way_holds_up_no_flush() -> None:
    desk = Desk()
    desk.opened()
    desk.wait_out()

    beat = desk.take()

    assert beat is not None
    assert desk.outbox.is_idle


def test_a_heartbeat_that_was_lost_is_sent_again_when_the_store_may_be_asked() -> None:
    desk = Desk()
    desk.opened()
    desk.wait_out()

    desk.lose()
    was_paused = desk.take() is None
    desk.wait_out()
    again = desk.answer([30_000, b"OK"])

    assert was_paused
    assert said(again) == ["heartbeat"]
    assert desk.take() is None


def test_a_lost_trajectory_raises_who_has_it_and_disturbs_no_other() -> None:
    desk = Desk()
    one, other = desk.opened(2)
    desk.wait_out()
    waiting = desk.append(one)

    desk.answer(1, [30_000, b"FENCED g/0/0 was taken over by x with epoch 2", b"OK"])

    assert not waiting.errors  # the store took it before it was asked
    for write in (lambda: desk.append(one), lambda: desk.seal(one)):
        with pytest.raises(FencedError, match="g/0/0 was taken over by x with epoch 2"):
            write()
    assert not desk.append(other).errors
    assert desk.outbox.num_open == 1


def test_trajectories_of_a_run_that_is_gone_are_lost_by_their_heartbeat() -> None:
    # A generator that plays on for hours must not write into another run of the same name.
    desk = Desk()
    one, ending = desk.opened(2)
    desk.append(ending)
    desk.seal(ending)
    desk.wait_out()

    desk.answer(2, ResponseError("NORUN no such run"))

    with pytest.raises(RunNotFoundError):
        desk.append(one)
    assert ending.error is None  # its seal is on its way, and is answered by itself
    assert desk.outbox.num_open == 1


def test_a_trajectory_that_a_turn_found_lost_is_not_lost_again_by_the_heartbeat() -> None:
    desk = Desk()
    (lane,) = desk.opened()
    desk.wait_out()
    waiting = desk.append(lane)

    desk.answer(
        ResponseError("FENCED epoch 2 writes, not 1"), [30_000, b"FENCED g/0/0 is abandoned: why"]
    )

    with pytest.raises(FencedError, match="epoch 2 writes"):
        waiting.raise_error()
    with pytest.raises(FencedError, match="epoch 2 writes"):
        desk.append(lane)


def test_a_trajectory_that_ends_is_judged_by_its_end_alone() -> None:
    # The planner found the seal and posted it, before this publisher could: to the heartbeat, the
    # trajectory is not open any more.
    desk = Desk()
    (lane,) = desk.opened()
    desk.append(lane)
    end = desk.seal(lane)
    desk.now_s += 1.0

    desk.answer(2, [30_000, b"FENCED g/0/0 is sealed: 1"])
    was_done = end.is_done
    desk.answer([b"DUPLICATE"])

    assert (was_done, end.is_done) == (False, True)
    assert not end.errors


def test_an_adopted_trajectory_goes_on_behind_its_stored_turns() -> None:
    desk = Desk()
    lane = desk.outbox.adopt(KEYS[0], epoch=4, num_turns=2, num_bytes=0, now_s=desk.now_s)
    desk.append(lane)

    sent = desk.answer(1)
    desk.wait_out()
    beat = desk.answer()

    assert sent.commands[0].args[:3] == ("4/w", 2, 0)
    assert beat.commands[0].args == ("g/0/0", "4:w")


def test_more_leases_than_one_call_takes_travel_in_several() -> None:
    beats = Heartbeats()
    key = TrajectoryKey("g", 0)
    lanes = [Lane(key, f"{n}", TrajectoryKeys("t", "m"), epoch=1) for n in range(600)]
    for lane in lanes:
        beats.opened(lane, now_s=0.0)

    calls = beats.due(1.0)

    assert [len(call.lanes) for call in calls] == [256, 256, 88]
    assert [lane for call in calls for lane in call.lanes] == lanes


def reserved(sent: Round) -> list[tuple[str, int]]:
    """(trajectory id, bytes) of every reservation that a round asks for."""
    args = [c.args for c in sent.commands if c.script.name == "reserve"]
    return [(str(each[i]), int(each[i + 2])) for each in args for i in range(0, len(each), 3)]


def test_room_is_asked_for_in_blocks_when_a_trajectory_outgrows_what_it_has() -> None:
    desk = Desk()
    (lane,) = desk.opened()
    rounds = []

    for _ in range(12):
        desk.append(lane, response="B" * 1_000)
        rounds.append(desk.answer(1))

    size = lane.num_bytes // 12
    asked = [(number, *reserved(sent)[0]) for number, sent in enumerate(rounds) if reserved(sent)]
    first, second = FIRST_BYTES // size, (2 * (FIRST_BYTES // size + 1) * size) // size
    assert [number for number, _, _ in asked] == [first, second]
    assert [name for _, name, _ in asked] == ["g/0/0", "g/0/0"]
    assert asked[0][2] == pytest.approx(2 * (first + 1) * size, abs=8_000)


def test_room_is_asked_for_again_after_a_lost_connection() -> None:
    desk = Desk()
    (lane,) = desk.opened()
    desk.append(lane, response="B" * 5_000)

    lost = desk.lose()
    desk.wait_out()
    again = desk.take()

    assert again is not None
    assert reserved(again) == reserved(lost) != []


def test_room_is_asked_for_again_where_the_store_may_have_forgotten_it() -> None:
    desk = Desk(keep_s=5.0)
    (lane,) = desk.opened()
    desk.append(lane, response="B" * 5_000)
    asked = desk.answer(1)
    desk.append(lane)

    desk.lose()
    desk.wait_out()
    desk.answer()
    desk.answer([1])
    again = desk.take()

    assert again is not None
    assert [name for name, _ in reserved(again)] == ["g/0/0"]
    assert reserved(again) >= reserved(asked)


@pytest.mark.parametrize(
    ("tombstone", "num_lost"),
    [
        ("the trajectory is over, and its payload released", 0),
        ("the trajectory was given up, and its payload released", 1),
        ("the trajectory was never opened, or is released", 0),
    ],
)
def test_of_a_group_that_is_over_the_payload_says_what_was_given_up(
    tombstone: str, num_lost: int
) -> None:
    # A store lost a seal, and gave the trajectory up while its generator slept. When that sent it
    # again, the group was over, which was taken for the end of all that had been sealed.
    desk = Desk(keep_s=5.0)
    (lane,) = desk.opened()
    desk.append(lane)
    desk.seal(lane)
    desk.answer(2)
    desk.answer([b"OK"])
    desk.outbox.close_run("", Delivery())

    desk.lose()
    desk.wait_out()
    desk.answer()
    opening = desk.answer(ResponseError("CONFLICT group g was over: a name is used once"), b"OK")
    sent = desk.answer(ResponseError(f"FENCED {tombstone}"))

    assert (said(opening)[0], said(sent)) == ("open_group", ["append"])
    assert len(desk.outbox.take_losses()) == num_lost


def test_a_group_that_was_over_is_asked_for_first_after_every_restart() -> None:
    # After the second restart only the payload was asked. A tombstone that had ended meanwhile was
    # taken for a loss.
    desk = Desk(keep_s=5.0)
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
        over = ResponseError("CONFLICT group g was over: a name is used once")
        asked.append(said(desk.answer(over, *[b"OK"] * num_closings)))
        desk.answer(ResponseError("FENCED the trajectory was never opened, or is released"))

    assert [each[0] for each in asked] == ["open_group", "open_group"]
    assert desk.outbox.take_losses() == []


def test_what_is_sent_whole_asks_for_exactly_its_size() -> None:
    desk = Desk()
    (lane,) = desk.asked()
    desk.append(lane, response="B" * 5_000)
    desk.seal(lane)
    desk.answer([1])

    sent = desk.answer(2)

    assert reserved(sent) == [("g/0/0", lane.num_bytes)]


def test_the_seal_says_how_many_bytes_are_stored() -> None:
    desk = Desk()
    (lane,) = desk.opened()
    desk.append(lane)
    desk.seal(lane)
    desk.answer(2)

    posted = desk.answer([b"OK"])

    assert posted.commands[0].args[1] == f"1:/{lane.num_bytes + len(lane.seal_record)}:w"
