from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit.runs.run_driver import Drive, RunDriver
from turnstream.errors import ConflictError, FencedError, RunNotFoundError
from turnstream.store.run.groups import (
    LapsedTrajectory,
    adopt_command,
    heartbeat_command,
    list_lapsed_command,
    parse_lapsed,
)
from turnstream.types import TrajectoryKey

pytestmark = pytest.mark.redis


def now_ms(client: redis.Redis) -> int:
    seconds, microseconds = client.time()  # type: ignore[misc]
    return seconds * 1000 + microseconds // 1000


def end_ms(run: Any, trajectory_id: str = "g/0/0") -> int:
    """When a lease ends, by the store's clock."""
    return int(run.client.zscore(run.keys.leases, trajectory_id))


def lasts(run: Any, act: Callable[[], Any], *ids: str, lease_s: float = 30) -> bool:
    """Whether leases, that of g/0/0 unless others are named, end so long after this act of now."""
    began_ms = now_ms(run.client)
    act()
    done_ms = now_ms(run.client)
    acts_ms = [end_ms(run, each) - lease_s * 1000 for each in ids or ("g/0/0",)]
    return all(began_ms <= act_ms <= done_ms for act_ms in acts_ms)


def lapsed(run: Any) -> list[LapsedTrajectory]:
    return parse_lapsed(run.do(list_lapsed_command(run.name)))


def lapse(run: Any, trajectory_id: str = "g/0/0", *, since_ms: int = 1) -> None:
    """Let a lease end."""
    run.client.zadd(run.keys.leases, {trajectory_id: now_ms(run.client) - since_ms})


def heartbeat(run: Any, *held: tuple[str, int]) -> Any:
    return run.do(heartbeat_command(run.name, held, writer="w"))


def adopt(run: Any, writer: str = "second", trajectory_id: str = "g/0/0") -> Any:
    return run.do(adopt_command(run.name, trajectory_id, writer=writer))


def test_open_trajectory_has_a_lease_until_it_ends(drive: Drive) -> None:
    run = drive(lease_s=30)

    ids = [f"g/{sample}/0" for sample in range(3)]
    are_as_long = lasts(run, lambda: run.do(run.open_group(*ids, num_samples=3)), *ids)
    run.do(run.post_sealed("g/0/0", 1, b"seal"))
    run.do(run.abandon("g/1/0"))

    assert are_as_long
    assert run.client.zrange(run.keys.leases, 0, -1) == [b"g/2/0"]


def test_opening_again_renews_the_lease_for_the_same_writer_alone(drive: Drive) -> None:
    run = drive(lease_s=30)
    run.do(run.open_group("g/0/0"))
    lapse(run)

    before_ms = end_ms(run)
    run.do(run.open_group("g/0/0", writer="other"))
    of_another_ms = end_ms(run)

    assert of_another_ms == before_ms
    assert lasts(run, lambda: run.do(run.open_group("g/0/0")))


def test_a_heartbeat_renews_the_leases_of_its_writer(drive: Drive) -> None:
    run = drive(lease_s=30)
    run.do(run.open_group("g/0/0", "g/1/0"))
    lapse(run, since_ms=60_000)

    replies: list[Any] = []
    is_renewed = lasts(run, lambda: replies.append(heartbeat(run, ("g/0/0", 1), ("g/1/0", 1))))

    assert replies == [[30_000, b"OK", b"OK"]]
    assert is_renewed


def test_a_heartbeat_says_what_became_of_each_trajectory_that_is_lost(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0", "g/1/0", "g/2/0", num_samples=3))
    lapse(run)
    adopt(run, "second:w")
    run.do(run.abandon("g/1/0"))
    before = run.client.zscore(run.keys.leases, "g/0/0")

    _, *states = heartbeat(run, ("g/0/0", 1), ("g/1/0", 1), ("g/9/0", 1), ("g/2/0", 1))

    assert states == [
        b"FENCED g/0/0 was adopted by second:w with epoch 2",
        b"FENCED [abandoned] g/1/0 is abandoned: bored",
        b"FENCED [unknown] g/9/0 was never opened, or is released",
        b"OK",
    ]
    assert run.client.zscore(run.keys.leases, "g/0/0") == before
    assert run.client.zcard(run.keys.leases) == 2


def test_scripts_of_leases_need_a_run(missing_run: RunDriver) -> None:
    for act in (
        lambda: heartbeat(missing_run, ("g/0/0", 1)),
        lambda: adopt(missing_run),
        lambda: lapsed(missing_run),
    ):
        with pytest.raises(RunNotFoundError):
            act()


def test_a_lapsed_trajectory_goes_to_another_writer_with_the_next_epoch(drive: Drive) -> None:
    run = drive(lease_s=30)
    run.do(run.open_group("g/0/0", num_samples=2))
    lapse(run)

    replies: list[Any] = [adopt(run)]
    is_leased = lasts(run, lambda: replies.append(adopt(run)))

    assert replies == [[2, 2]] * 2
    assert run.ledger() == {b"g/0/0": b"open:2:second"}
    assert run.counts() == {"accepted": 1, "open": 1}
    assert is_leased


def test_a_lease_that_runs_is_not_taken_over(drive: Drive) -> None:
    run = drive(lease_s=30)
    run.do(run.open_group("g/0/0"))

    asked_ms = now_ms(run.client)
    with pytest.raises(ConflictError, match="g/0/0 is being written by w") as refusal:
        adopt(run)
    told_ms = now_ms(run.client)

    assert refusal.value.retry_after_s is not None
    left_ms = round(refusal.value.retry_after_s * 1000)
    assert end_ms(run) - told_ms <= left_ms <= end_ms(run) - asked_ms
    assert adopt(run, "w") == [1, 2]  # a generator that began again need not wait for its own
    assert run.ledger() == {b"g/0/0": b"open:1:w"}


def test_only_what_can_still_be_trained_is_taken_over(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0", "g/1/0"))
    run.do(run.open_group("h/0/0", group="h"))
    run.do(run.post_sealed("g/0/0", 1, b"seal"))
    run.do(run.abandon("g/1/0"))
    lapse(run, "h/0/0")
    run.client.hset(run.keys.groups, "h", "2:filtered")
    before = run.ledger()

    for trajectory_id, why in [
        ("g/0/0", "g/0/0 is already sealed"),
        ("g/1/0", "g/1/0 is already abandoned"),
        ("g/7/0", "g/7/0 was never opened"),
        ("h/0/0", "group h is already filtered"),
    ]:
        with pytest.raises(ConflictError, match=why):
            adopt(run, trajectory_id=trajectory_id)
    assert run.ledger() == before


def test_a_taken_trajectory_is_neither_sealed_nor_abandoned_by_the_old_writer(
    run: RunDriver,
) -> None:
    # The new writer has not appended anything: the ledger alone refuses.
    run.do(run.open_group("g/0/0"))
    run.do(run.append(b"turn 0000"))
    lapse(run)
    adopt(run)

    run.do(run.append(b"late 0000", b"seal 0000", first=1, seals=True, lease="1"))
    (answer,) = run.do(run.post_sealed("g/0/0", 1, b"seal 0000"))
    (refusal,) = run.do_all([run.abandon("g/0/0", epoch=1)])

    assert answer == b"FENCED g/0/0 is open:2:second, not open with epoch 1"
    assert isinstance(refusal, FencedError)
    assert run.ledger() == {b"g/0/0": b"open:2:second"}
    assert run.events() == [b"opened g"]


def test_an_empty_first_append_of_the_new_writer_refuses_every_late_turn(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0"))
    run.do(run.append(b"turn 0000"))
    lapse(run)
    adopt(run)
    late_but_before = run.do(run.append(b"turn 1111", first=1, lease="1"))

    fence = [run.do(run.append(lease="2:second")) for _ in range(2)]
    refusals = run.do_all(
        [
            run.append(b"turn 2222", first=2, lease="1"),
            run.append(b"turn 0000", lease="1:w"),
            run.append(b"seal", first=2, seals=True, lease="1"),
        ]
    )
    stored = run.do(run.append(b"turn 3333", first=2, lease="2"))

    assert (late_but_before, fence, stored) == (1, [0, 0], 1)
    assert [type(refusal) for refusal in refusals] == [FencedError] * 3
    assert [record for _, record in run.turns()] == [b"turn 0000", b"turn 1111", b"turn 3333"]


def test_lapsed_trajectories_are_listed_the_longest_lapsed_first(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0", "g/1/0", "g/2/0", num_samples=3, writer="host:1"))
    lapse(run, "g/0/0", since_ms=10)
    lapse(run, "g/2/0", since_ms=5000)

    found = lapsed(run)
    first = parse_lapsed(run.do(list_lapsed_command(run.name, max_count=1)))

    assert found == [
        LapsedTrajectory(key=TrajectoryKey("g", sample), writer="host:1", epoch=1)
        for sample in (2, 0)
    ]
    assert [each.key.trajectory_id for each in first] == ["g/2/0"]


def test_a_lease_from_before_the_clock_was_set_back_is_cut(drive: Drive) -> None:
    # The server's clock went back by an hour: to it, the leases end in an hour and a half minute.
    run = drive(lease_s=30)
    run.do(run.open_group("g/0/0", "g/1/0"))
    for name in ("g/0/0", "g/1/0"):
        lapse(run, name, since_ms=-3_630_000)

    def ask() -> None:
        with pytest.raises(ConflictError):
            adopt(run)

    listed: list[Any] = []
    is_cut = [
        lasts(run, ask),
        lasts(run, lambda: listed.extend(lapsed(run)), "g/1/0"),
    ]

    assert is_cut == [True, True]
    assert listed == []


def test_only_the_writer_in_the_ledger_counts_with_equal_epochs(run: RunDriver) -> None:
    # The store lost the take-over of "lost" in a power cut, and gave its epoch to "second" since.
    run.do(run.open_group("g/0/0"))
    run.do(run.append(b"turn 0"))
    lapse(run)
    assert adopt(run, "second") == [2, 2]
    run.do(run.append(first=1, lease="2:second"))

    (_, beat) = run.do(heartbeat_command(run.name, [("g/0/0", 2)], writer="lost"))
    turn, seal = run.do_all(
        [
            run.append(b"turn 1", first=1, lease="2/lost"),
            run.post_sealed("g/0/0", "2::lost", b"seal"),
        ]
    )
    (given_up,) = run.do_all([run.abandon("g/0/0", "2:lost")])
    own = run.do_all(
        [
            run.append(b"turn 1", first=1, lease="2/second"),
            run.post_sealed("g/0/0", "2::second", b"seal"),
        ]
    )

    assert beat.startswith(b"FENCED g/0/0 was adopted by second")
    assert isinstance(turn, FencedError)
    assert seal[0].startswith(b"FENCED")
    assert isinstance(given_up, FencedError)
    assert own == [1, [b"OK"]]
