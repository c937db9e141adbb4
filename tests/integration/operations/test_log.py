"""The command log of a model: leases, gaps, shared passes, and large histories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from testkit import wait_until
from testkit.runs.command_logs import DONE, CommandLogs, run_all
from turnstream.errors import (
    BatchingError,
    EndOfRunError,
    FencedError,
    RejectedError,
    RunNotFoundError,
)
from turnstream_server.operations import log as command_log
from turnstream_server.operations.announcing import Wakeups
from turnstream_server.operations.keys import WAKE, model_keys
from turnstream_server.operations.log import (
    DEFAULT_GAP_S,
    MAX_AHEAD,
    MAX_SHARED,
    Gap,
    HistoryEntry,
    Idle,
    Lost,
    ModelLog,
    Run,
)
from turnstream_server.operations.results import Failure, encode_result


def test_log_of_another_worker_is_free_after_its_lease(logs: CommandLogs) -> None:
    model_id = logs.new_model()
    log = logs.acquire(model_id, "w0", lease_s=60.0)

    with pytest.raises(RejectedError, match="run by worker 'w0'") as error:
        logs.acquire(model_id, "w1")
    assert 50 < (error.value.retry_after_s or 0) <= 60

    log.renew(lease_s=0.05)
    wait_until(lambda: _can_acquire(logs, model_id, "w1"))
    log = logs.acquire(model_id, "w1")
    log.renew(lease_s=0)
    logs.acquire(model_id, "w2")


def _can_acquire(logs: CommandLogs, model_id: str, worker: str) -> bool:
    try:
        logs.acquire(model_id, worker)
    except RejectedError:
        return False
    return True


def test_lease_that_a_clock_has_made_longer_is_cut(logs: CommandLogs) -> None:
    # After a clock was set back by an hour, a worker that is gone would hold its models so long.
    model_id = logs.new_model()
    logs.acquire(model_id, "w0", lease_s=60.0)
    seconds: Any = logs.client.time()
    logs.client.hset(model_keys(model_id).model, "lease_ms", (seconds[0] + 3600) * 1000)

    for _ in range(2):
        with pytest.raises(RejectedError) as error:
            logs.acquire(model_id, "w1")
        assert 50 < (error.value.retry_after_s or 0) <= 60


def test_paused_worker_continues_after_its_lease_unless_another_took_over(
    logs: CommandLogs,
) -> None:
    model_id = logs.new_model()
    paused = logs.acquire(model_id, "w0", lease_s=0.01)
    wait_until(lambda: _left_ms(logs, model_id) < 0)

    assert paused.take() == Run(0, 0, "create")
    other = logs.acquire(model_id, "w1")
    with pytest.raises(FencedError, match="another worker runs model"):
        paused.finish({0: DONE})

    assert logs.results(model_id) == {}
    assert other.take() == Run(0, 0, "create")


def _left_ms(logs: CommandLogs, model_id: str) -> float:
    seconds: Any = logs.client.time()
    until: Any = logs.client.hget(model_keys(model_id).model, "lease_ms")
    return int(until) - seconds[0] * 1000 - seconds[1] / 1000


def test_model_that_does_not_exist_has_no_log(logs: CommandLogs) -> None:
    with pytest.raises(RunNotFoundError, match="no model 'S:train:99'"):
        logs.acquire("S:train:99")
    with pytest.raises(RunNotFoundError, match="no model 'S:train:99'"):
        logs.submit("S:train:99", 1)
    assert logs.client.exists(*model_keys("S:train:99")) == 0


def test_missing_number_fails_those_that_wait_for_it_after_the_limit(logs: CommandLogs) -> None:
    model_id = logs.new_model()
    log = logs.acquire(model_id)
    run_all(log)
    for number in (2, 4):
        logs.submit(model_id, number)
    logs.submit(model_id, 5, refusal=Failure("refused", "user"))

    first = log.take()
    assert isinstance(first, Gap)
    assert (first.missing, first.left_s) == (1, DEFAULT_GAP_S)
    lost = wait_until(lambda: _lost(log), describe="the limit of the wait")
    assert lost is not None

    assert lost == Lost(1, (1, 2, 3, 4))
    results = logs.results(model_id)
    assert all("operation 1 of the model" in results[each].error for each in lost.failed)
    assert results[5] == Failure("refused", "user")
    assert logs.numbers_with_bodies(model_id) == {0}
    assert str(logs.submit(model_id, 3)) == f"{model_id}:3"  # too late
    logs.submit(model_id, 6)
    assert log.take() == Run(6, 6, "optim_step")
    assert [each.run.first for each in logs.acquire(model_id).history()] == [0]


def _lost(log: ModelLog) -> Lost | None:
    work = log.take(gap_s=0.1)
    assert isinstance(work, Gap | Lost)
    return work if isinstance(work, Lost) else None


def test_refused_number_closes_a_gap_and_wakes_the_worker(logs: CommandLogs) -> None:
    model_id = logs.new_model()
    log = logs.acquire(model_id)
    run_all(log)
    logs.submit(model_id, 2)
    assert isinstance(log.take(), Gap)
    newest: Any = logs.client.xrevrange(WAKE, count=1)

    logs.submit(model_id, 1, refusal=Failure("refused", "user"))

    wakes: Any = logs.client.xread({WAKE: newest[0][0]})
    assert wakes[0][1][0][1] == {b"m": model_id.encode()}
    assert log.take() == Run(2, 2, "optim_step")


def test_number_far_ahead_is_refused_with_the_limit(logs: CommandLogs) -> None:
    # One script fails all numbers up to the newest: with 2**31 the store would stop for minutes.
    model_id = logs.new_model()

    with pytest.raises(BatchingError, match=f"seq_id {2**31} .*expected {MAX_AHEAD} at most"):
        logs.submit(model_id, 2**31)
    logs.submit(model_id, MAX_AHEAD)

    log = logs.acquire(model_id)
    run_all(log)
    lost = log.take(gap_s=0.0)
    assert isinstance(lost, Lost)
    assert lost.failed == tuple(range(1, MAX_AHEAD + 1))


@pytest.mark.parametrize("method", ["take", "finish", "cover", "renew", "history"])
@pytest.mark.parametrize("state", ["fenced", "ended"])
def test_worker_that_must_stop_can_write_nothing(
    logs: CommandLogs, state: str, method: str
) -> None:
    model_id = logs.new_model()
    log = logs.acquire(model_id)
    run_all(log)
    keys = model_keys(model_id)
    if state == "fenced":
        logs.acquire(model_id, "w0")
    else:
        logs.client.hset(keys.model, "ended", "closed")
        logs.client.delete(keys.commands, keys.bodies, keys.results)
    before = [logs.client.dump(key) for key in keys]
    log = ModelLog(
        logs.client, model_id, epoch=log._epoch, next_number=1, covered=-1, checkpoint=""
    )
    calls: dict[str, Callable[[], Any]] = {
        "take": log.take,
        "finish": lambda: log.finish({0: DONE}),
        "cover": lambda: log.cover(0, checkpoint="c"),
        "renew": lambda: log.renew(lease_s=60.0),
        "history": lambda: [*log.history()],
    }

    with pytest.raises(FencedError if state == "fenced" else EndOfRunError):
        calls[method]()

    after = [logs.client.dump(key) for key in keys]
    assert after[1:] == before[1:]
    if state == "fenced":
        assert after == before


def test_idle_poll_writes_nothing(logs: CommandLogs) -> None:
    model_id = logs.new_model()
    log = logs.acquire(model_id)
    run_all(log)

    def changes() -> int:
        persistence: Any = logs.client.info("persistence")
        return persistence["rdb_changes_since_last_save"]

    before = changes()
    assert {log.take() for _ in range(5)} == {Idle()}
    assert changes() == before


def test_passes_end_at_their_limits(logs: CommandLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    model_id = logs.new_model()
    log = logs.acquire(model_id)
    run_all(log)
    for number in range(1, MAX_SHARED + 3):
        logs.submit(model_id, number, "forward_backward", b"c")
    logs.submit(model_id, MAX_SHARED + 3, "forward_backward", b"c" * 100)
    logs.submit(model_id, MAX_SHARED + 4, "forward_backward", b"c")

    monkeypatch.setattr(command_log, "MAX_SHARED_BYTES", 100)

    assert [(run.first, run.last) for run in run_all(log)] == [
        (1, MAX_SHARED),
        (MAX_SHARED + 1, MAX_SHARED + 2),
        (MAX_SHARED + 3, MAX_SHARED + 3),
        (MAX_SHARED + 4, MAX_SHARED + 4),
    ]


def test_result_of_a_later_number_does_not_pass_over_earlier_ones(logs: CommandLogs) -> None:
    model_id = logs.new_model()
    log = logs.acquire(model_id)
    run_all(log)
    for number in (1, 2, 3):
        logs.submit(model_id, number, "forward_backward")
    assert log.take() == Run(1, 3, "forward_backward")

    log.finish({2: Failure("alone", "user")})

    assert log.take() == Run(1, 3, "forward_backward")
    log.finish({1: DONE, 3: DONE})
    assert log.take() == Idle()
    assert logs.results(model_id)[2] == Failure("alone", "user")
    assert [*logs.acquire(model_id).history()][1:] == [
        HistoryEntry(Run(1, 3, "forward_backward"), frozenset({2}))
    ]


def test_large_history_is_read_in_slices(logs: CommandLogs) -> None:
    model_id = logs.new_model()
    log = logs.acquire(model_id)
    number, expected = 1, run_all(log)
    keys = model_keys(model_id)
    pipeline = logs.client.pipeline(transaction=False)
    while number < 2_500:
        last = number + (number % 60 if number % 3 else 0)
        kind: Any = "forward_backward" if number % 3 else "optim_step"
        expected.append(Run(number, last, kind))
        pipeline.hset(keys.passes, str(number), last)
        for each in expected[-1].numbers:
            pipeline.hset(keys.commands, str(each), f"{kind} x")
            pipeline.hset(keys.bodies, str(each), "c")
            pipeline.hset(keys.results, str(each), encode_result(DONE))
        number = last + 1
    pipeline.hset(keys.model, "next", number)
    pipeline.execute()

    log = logs.acquire(model_id)

    assert [*log.history()] == [HistoryEntry(run, frozenset()) for run in expected]
    covered = expected[len(expected) // 2]
    log.cover(covered.last, checkpoint="c")
    rest = [entry.run for entry in logs.acquire(model_id).history()]
    assert rest == [run for run in expected if run.first > covered.last]


def test_wakeups_name_the_models_with_new_commands(logs: CommandLogs) -> None:
    one, two = logs.new_model(), logs.new_model()
    wakeups = Wakeups(logs.client)
    assert wakeups.read(block_s=0.0) == set()

    for model_id in (one, two):
        logs.submit(model_id, 1)

    assert wakeups.read(block_s=5.0) == {one, two}
    assert wakeups.read(block_s=0.0) == set()
