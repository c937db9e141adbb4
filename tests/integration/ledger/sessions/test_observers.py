from functools import partial
from typing import Any

import pytest

from turnstream.errors import (
    ConflictError,
    InvalidConfigError,
    ObserverExpiredError,
    RejectedError,
    StoreBehindError,
)
from turnstream_server.ledger.sessions import observers
from turnstream_server.ledger.sessions.observers import (
    Declared,
    declare_observer,
    forget_observers,
    note_observed,
    read_observers,
    remove_observer,
)

PLANNED = 9


async def declare(
    run: Any,
    observer: str = "o",
    *,
    first_step: int | None = None,
    expiry_s: float = 60.0,
    **caller: Any,
) -> Declared:
    await run.client.hset(run.keys.frontier, "planned", PLANNED)
    return await declare_observer(
        run.client, run.name, observer=observer, first_step=first_step, expiry_s=expiry_s, **caller
    )


async def forget(run: Any, *, after_ms: int = 0) -> int:
    """Forget the observers that are silent when so much of the run's time has passed."""
    return await forget_observers(
        run.term,
        run_ms=await run.run_ms() + after_ms,
    )


async def test_new_observer_starts_at_its_step_or_after_the_stepped_one(run: Any) -> None:
    await run.client.hset(run.keys.frontier, "stepped", 4)

    assert await declare(run, "from the start", first_step=1) == (1, 0)
    assert await declare(run, "from here") == (5, 0)


async def test_an_observer_comes_back_behind_what_it_has_seen(run: Any) -> None:
    await declare(run, first_step=1)
    await note_observed(run.client, run.name, observer="o", seen=7)
    await note_observed(run.client, run.name, observer="o", seen=3)

    again = await declare(run, first_step=1)

    assert again == (8, 0)


async def test_a_silent_observer_is_forgotten_and_told_so(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await declare(run, first_step=4, expiry_s=60)

    left_ms = [await forget(run, after_ms=59_999), await forget(run, after_ms=60_000)]
    again_ms = await forget(run, after_ms=60_000)

    assert (left_ms, again_ms) == ([1, -1], -1)
    assert [record.message for record in caplog.records] == [
        f"run {run.name}: observer 'o' was silent for 60 s; nothing after step 3 is kept for it"
    ]
    for _ in range(2):
        with pytest.raises(ObserverExpiredError, match=r"observer o was silent for more than 60 s"):
            await note_observed(run.client, run.name, observer="o", seen=1)
    with pytest.raises(ObserverExpiredError, match="observer nobody was never declared"):
        await note_observed(run.client, run.name, observer="nobody", seen=1)


async def test_observer_that_skips_an_unseen_batch_counts_as_silent(run: Any) -> None:
    # The prefetch of an observer that hangs must not keep payload.
    await declare(run, first_step=4, expiry_s=60)
    await run.client.hincrby(run.keys.clock, "ms", 30_000)

    expiry_s = await note_observed(run.client, run.name, observer="o", asks=5)
    ahead_ms = await forget(run)
    await note_observed(run.client, run.name, observer="o", asks=4)
    next_ms = await forget(run)

    assert expiry_s == 60
    assert (ahead_ms, next_ms) == (30_000, 60_000)


@pytest.mark.parametrize("at_ms", [1, 10**15], ids=["ahead", "back"])
async def test_clock_jump_neither_expires_an_observer_nor_keeps_it(run: Any, at_ms: int) -> None:
    # The jump is after the last tick of the planner, and before the call of the observer.
    await run.client.hset(run.keys.clock, mapping={"at_ms": at_ms, "most_ms": 500})
    await declare(run, expiry_s=60)

    await note_observed(run.client, run.name, observer="o")

    assert await forget(run) == 60_500


async def test_an_observer_that_is_late_lives_on_until_it_is_forgotten(run: Any) -> None:
    await declare(run, expiry_s=1)
    await run.client.hincrby(run.keys.clock, "ms", 2_000)

    await note_observed(run.client, run.name, observer="o")

    assert await forget(run) == 1_000


@pytest.mark.parametrize(
    ("first_step", "told"), [(None, (7, 3)), (4, (4, 3)), (3, (3, 0)), (1, (1, 0))]
)
async def test_expired_observer_restarts_with_its_missed_steps(
    run: Any, first_step: int | None, told: tuple[int, int]
) -> None:
    # It went on at another step without a word.
    await declare(run, first_step=1, expiry_s=1)
    await note_observed(run.client, run.name, observer="o", seen=2)
    await forget(run, after_ms=1_000)
    await run.client.hset(run.keys.frontier, "stepped", 6)

    assert await declare(run, first_step=first_step) == told


async def test_missed_steps_are_reported_until_one_is_seen(run: Any) -> None:
    await declare(run, first_step=1, expiry_s=1)
    await forget(run, after_ms=1_000)
    await run.client.hset(run.keys.frontier, "stepped", 6)

    told = [await declare(run, expiry_s=1) for _ in range(2)]
    await note_observed(run.client, run.name, observer="o")
    await forget(run, after_ms=1_000)
    told.append(await declare(run))
    await note_observed(run.client, run.name, observer="o", seen=7)
    told.append(await declare(run))

    assert told == [(7, 1), (7, 1), (7, 1), (8, 0)]


async def test_expired_observers_with_the_newest_steps_are_kept(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observers, "MOST_FORGOTTEN", 2)
    for step in (3, 1, 2):
        await declare(run, f"o{step}", first_step=step, expiry_s=1)

    await forget(run, after_ms=1_000)

    assert set(await run.client.hkeys(run.keys.observers)) == {b"o2", b"o3"}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"observer": ""}, "observer"),
        ({"first_step": 0}, "first_step"),
        ({"expiry_s": 0.0}, "expiry_s"),
        ({"expiry_s": float("nan")}, "expiry_s"),
        ({"expiry_s": 7 * 86_400 + 1}, "expiry_s"),
    ],
)
async def test_an_observer_that_cannot_be_is_refused(run: Any, wrong: Any, field: str) -> None:
    with pytest.raises(InvalidConfigError, match=field):
        await declare(run, **wrong)

    assert not await run.client.exists(run.keys.observers)


@pytest.mark.both_servers
async def test_observer_is_of_its_owner_and_no_step_beyond_the_planned(run: Any) -> None:
    mine: Any = {"owner": "me", "is_admin": False}
    other: Any = {"owner": "other", "is_admin": False}
    observed = partial(note_observed, run.client, run.name, observer="o")
    await declare(run, first_step=1, expiry_s=1, **mine)

    for expired in (False, True):
        with pytest.raises(ConflictError, match="observer o belongs to another API key"):
            await declare(run, **other)
        with pytest.raises(ConflictError, match="another API key"):
            await observed(seen=PLANNED, **other)
        if not expired:
            await forget(run, after_ms=1_000)
    await declare(run, **mine)
    with pytest.raises(StoreBehindError, match=f"the newest batch of this store is {PLANNED}"):
        await observed(seen=PLANNED + 1, **mine)
    with pytest.raises(RejectedError, match=f"first_step: {PLANNED + 2} is after step"):
        await declare(run, "ahead", first_step=PLANNED + 2)
    await observed(seen=PLANNED, owner="operator", is_admin=True)
    assert [(each.owner, each.seen) for each in read_observers(run.store, run.name)] == [("me", 9)]

    before = await run.last_wake_up()
    assert remove_observer(run.store, run.name, "o")
    assert not remove_observer(run.store, run.name, "o")
    assert await run.last_wake_up() != before
    with pytest.raises(ObserverExpiredError, match="was removed"):
        await observed(**mine)
    await declare(run, **other)


async def test_observers_have_limits_for_each_owner_and_run(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observers, "MOST_OF_OWNER", 2)
    monkeypatch.setattr(observers, "MOST_OBSERVERS", 3)
    for number, owner in enumerate(("a", "a", "b")):
        await declare(run, f"o{number}", expiry_s=1, owner=owner)

    with pytest.raises(RejectedError, match="the key has 2 observers of the run; the limit is 2"):
        await declare(run, "o9", owner="a")
    with pytest.raises(RejectedError, match="the run has 3 observers; the limit is 3"):
        await declare(run, "o9", owner="b")
    await declare(run, "o1", owner="a")
    await forget(run, after_ms=1_000)
    await declare(run, "o9", owner="b")


async def test_observer_of_an_earlier_release_gets_the_owner_that_resumes_it(run: Any) -> None:
    await run.client.hset(run.keys.observers, "o", f"3:{await run.run_ms() + 60_000}:60000:2")

    assert await declare(run, owner="me", is_admin=False) == (4, 2)
    assert [each.owner for each in read_observers(run.store, run.name)] == ["me"]


async def test_observer_expires_only_after_its_expiry_of_silence(run: Any) -> None:
    # The clock of the reader may be behind that of the last writer.
    heard_ms = await run.run_ms() + 10**9
    entries = {"ahead": f"3:{heard_ms + 60_000}:60000", "gone": "4:0:60000"}
    await run.client.hset(run.keys.observers, mapping=entries)

    ahead, gone = read_observers(run.store, run.name)

    assert (ahead.seen, ahead.silent_s) == (3, 0)
    assert (gone.seen, gone.silent_s, gone.left_s) == (4, 60, 0)
