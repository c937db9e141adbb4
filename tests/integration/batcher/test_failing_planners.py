"""A planner that fails tries again, later and later, and says why for as long as that is so."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from testkit import group, wait_until_async
from turnstream.errors import FencedError, StoreUnavailableError
from turnstream.store.client import backoff, keys
from turnstream_server.batcher.planner import planner

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


class Failing:
    """A call before a plan is written that raises at first, and later never returns.

    Attributes:
        failed_s: when it raised, by the loop's clock.
        is_waiting: whether a plan is waiting.
    """

    def __init__(self, error: Exception, *, num_times: int = 1) -> None:
        self._error = error
        self._num_times = num_times
        self.failed_s: list[float] = []
        self.is_waiting = asyncio.Event()

    async def __call__(self, _: object) -> None:
        """Raise, or wait, before a plan is written."""
        if len(self.failed_s) < self._num_times:
            self.failed_s.append(asyncio.get_running_loop().time())
            raise self._error
        self.is_waiting.set()
        await asyncio.Event().wait()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the first pause of a planner that fails, and when a term has lasted."""

    def set_pauses(*, first_s: float = 0.02, settled_s: float = 60.0) -> None:
        monkeypatch.setattr(backoff, "FIRST_PAUSE_S", first_s)
        monkeypatch.setattr(backoff, "LONGEST_PAUSE_S", 60.0)
        monkeypatch.setattr(planner, "_SETTLED_S", settled_s)

    return set_pauses


async def fail(house: Any, hook: Failing) -> tuple[str, Any]:
    """A run and its batcher, whose planner fails as the hook says."""
    run = house.create_run(batch_groups=1)
    batcher = await house.start_batcher(before_write=hook)
    await house.publish(run, group("g0"))
    return run, batcher


def trouble(house: Any, run: str) -> bytes | None:
    return house.client.execute_command("HGET", keys.run_keys(run).leader, "planning_trouble")


async def test_a_planner_that_fails_at_once_pauses_longer_and_longer(house, pauses):
    pauses()
    hook = Failing(RuntimeError("a defect"), num_times=4)

    await fail(house, hook)
    await asyncio.wait_for(hook.is_waiting.wait(), 30)

    gaps = [later - sooner for sooner, later in itertools.pairwise(hook.failed_s)]
    assert all(gap >= least for gap, least in zip(gaps, (0.02, 0.04, 0.08), strict=True)), gaps


async def test_planner_whose_terms_lasted_repeats_the_first_pause(house, pauses):
    pauses(first_s=0.5, settled_s=0.0)
    hook = Failing(RuntimeError("a defect"), num_times=4)

    await fail(house, hook)
    await asyncio.wait_for(hook.is_waiting.wait(), 30)

    gaps = [later - sooner for sooner, later in itertools.pairwise(hook.failed_s)]
    assert all(gap >= 0.5 for gap in gaps)
    assert gaps[-1] < 2.0  # the third pause of a planner whose terms end at once


@pytest.mark.parametrize(
    ("error", "words"),
    [(RuntimeError("a defect"), "a defect"), (ValueError(), r"ValueError\(\)")],
)
async def test_why_planning_failed_is_said_until_a_term_has_lasted(house, pauses, error, words):
    pauses()  # longer than the test: no term lasts
    hook = Failing(error, num_times=1)
    run, batcher = await fail(house, hook)
    trainer = house.trainer(batcher, run)
    await trainer.start()

    await trainer.refused(1, words=f"^step 1: .*; batcher .* cannot .*: {words}$")

    assert trouble(house, run) == (str(error) or repr(error)).encode()


async def test_lasting_term_clears_the_recorded_trouble(house, pauses):
    pauses(settled_s=0.1)
    hook = Failing(RuntimeError("a defect"), num_times=1)
    run, batcher = await fail(house, hook)
    trainer = house.trainer(batcher, run)
    await trainer.start()
    await asyncio.wait_for(hook.is_waiting.wait(), 30)

    await trainer.refused(1, words=r"^(?!.*cannot)")

    await wait_until_async(lambda: not trouble(house, run))


@pytest.mark.parametrize("error", [FencedError("not ours"), StoreUnavailableError("no answer")])
async def test_normal_end_of_a_term_is_not_recorded_as_trouble(house, pauses, error):
    pauses()
    hook = Failing(error)
    run, batcher = await fail(house, hook)
    trainer = house.trainer(batcher, run)
    await trainer.start()
    await asyncio.wait_for(hook.is_waiting.wait(), 30)

    await trainer.refused(1, words="^(?!.*cannot)")

    assert trouble(house, run) is None


async def test_a_leader_whose_store_is_away_stops_without_a_complaint(house_at, own_server, caplog):
    house = house_at(own_server.url)
    hook = Failing(RuntimeError(), num_times=0)
    _, batcher = await fail(house, hook)
    await asyncio.wait_for(hook.is_waiting.wait(), 30)
    await asyncio.to_thread(own_server.kill)

    async with asyncio.timeout(60):
        await batcher.stop()

    assert "Traceback" not in caplog.text


async def test_defect_is_raised_although_the_store_cannot_record_it(house, pauses, caplog):
    pauses()

    async def fail_and_break_the_leader(_: object) -> None:
        house.client.set(keys.run_keys(run).leader, "no hash")
        raise RuntimeError("a defect")

    run = house.create_run(batch_groups=1)
    await house.start_batcher(before_write=fail_and_break_the_leader)
    await house.publish(run, group("g0"))

    def failures() -> list[Any]:
        return [each.exc_info for each in caplog.records if "planning of" in each.getMessage()]

    await wait_until_async(lambda: bool(failures()))
    house.client.delete(keys.run_keys(run).leader)
    assert failures()[0][0] is RuntimeError
