"""Leaders: a lease kept by a thread, failing planners, and what a successor takes over."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from testkit import group, wait_until, wait_until_async
from turnstream.errors import FencedError, StoreUnavailableError
from turnstream.store.client import backoff, keys
from turnstream.store.client.cancellation import cancel_all
from turnstream.store.client.connection import connect, connect_async
from turnstream_server.batcher.planner import planner, releaser, renewal, timekeeper
from turnstream_server.batcher.planner.chain import PAGE_MANIFESTS
from turnstream_server.batcher.planner.renewal import LeadershipKeeper
from turnstream_server.ledger.core.frontier import read_frontier_async
from turnstream_server.ledger.leadership.leader_fields import release_leadership
from turnstream_server.ledger.leadership.writes import Term, acquire_leadership

LEASE_S = 0.5


async def is_renewed(url: str, run: str, number: int) -> None:
    ends: set[Any] = set()

    async def is_so() -> bool:
        with connect(url) as client:
            ends.add(client.hget(keys.run_keys(run).leader, "expires_ms"))
        return len(ends) > number

    await wait_until_async(is_so, describe=f"{number} renewals of the leadership")


@contextlib.asynccontextmanager
async def held(
    url: str, *runs: str, lease_s: float = LEASE_S
) -> AsyncIterator[tuple[Any, list[asyncio.Task[None]]]]:
    """Hold the leaderships of runs in epoch 1; yield a client, and the tasks that hold them."""
    async with connect_async(url) as client:
        keeper = LeadershipKeeper(url, owner="p", lease_s=lease_s)
        try:
            for run in runs:
                await acquire_leadership(client, run, owner="p", lease_s=lease_s)
            holds = [asyncio.create_task(keeper.hold(run, 1)) for run in runs]
            yield client, holds
            await cancel_all(holds)
        finally:
            await keeper.close()


async def test_planner_keeps_its_leadership_while_its_loop_is_busy(cluster, monkeypatch):
    monkeypatch.setattr(renewal, "RENEWALS_PER_LEASE", 600)
    run = cluster.create_run()
    ends: set[Any] = set()

    def is_renewed_often() -> bool:
        ends.add(cluster.client.hget(keys.run_keys(run).leader, "expires_ms"))
        return len(ends) > 4

    async with held(cluster.url, run, lease_s=60.0) as (_, holds):
        await asyncio.sleep(0)  # the tasks start
        wait_until(is_renewed_often, describe="renewals while the event loop stands still")
        await asyncio.sleep(0)

        assert not holds[0].done()


async def test_losing_the_leadership_ends_the_term_and_no_other(cluster):
    lost, kept = cluster.create_run(), cluster.create_run()
    async with held(cluster.url, lost, kept) as (client, holds):
        await release_leadership(Term(client, lost, 1), owner="p")
        await acquire_leadership(client, lost, owner="q", lease_s=60)

        with pytest.raises(FencedError, match="epoch 1 has ended, 'q' leads with epoch 2"):
            await holds[0]
        assert not holds[1].done()


async def test_short_outage_of_the_store_costs_no_leadership(cluster_at, own_server, caplog):
    run = cluster_at(own_server.url).create_run()
    async with held(own_server.url, run) as (_, holds):
        await asyncio.to_thread(own_server.kill)
        await wait_until_async(lambda: "leaderships cannot be renewed" in caplog.text)
        await asyncio.to_thread(own_server.restart)
        await is_renewed(own_server.url, run, 1)

        assert not holds[0].done()


async def test_leader_whose_epoch_was_granted_again_writes_nothing(
    cluster_at, own_server, past_of, caplog, monkeypatch
):
    monkeypatch.setattr(timekeeper, "LONGEST_PAUSE_S", 600.0)
    cluster = cluster_at(own_server.url)
    run = cluster.create_run(batch_groups=1, lease_s=6000)
    await cluster.publish(run, group("g0"))
    past = past_of(own_server)
    is_checked, may_write = asyncio.Event(), asyncio.Event()

    async def wait(_manifest):
        is_checked.set()
        await may_write.wait()

    async def release_nothing(_self):
        await asyncio.Event().wait()

    monkeypatch.setattr(releaser.Releaser, "run", release_nothing)
    await cluster.start_batcher(before_write=wait, lease_s=600)
    await is_checked.wait()
    async with connect_async(own_server.url) as client:
        epoch: Any = await client.hget(keys.run_keys(run).leader, "epoch")
        await asyncio.to_thread(past.come_back)
        other = await acquire_leadership(client, run, owner="other", lease_s=60)
        may_write.set()

        await wait_until_async(
            lambda: f"no longer leading run {run}" in caplog.text, describe="the end of the term"
        )
        planned = (await read_frontier_async(client, run)).planned

    assert (other.is_ours, other.epoch) == (True, int(epoch))
    assert planned == 0


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
    def set_pauses(*, first_s: float = 0.02, settled_s: float = 60.0) -> None:
        monkeypatch.setattr(backoff, "FIRST_PAUSE_S", first_s)
        monkeypatch.setattr(backoff, "LONGEST_PAUSE_S", 60.0)
        monkeypatch.setattr(planner, "_SETTLED_S", settled_s)

    return set_pauses


async def fail(cluster: Any, hook: Failing) -> tuple[str, Any]:
    run = cluster.create_run(batch_groups=1)
    batcher = await cluster.start_batcher(before_write=hook)
    await cluster.publish(run, group("g0"))
    return run, batcher


@pytest.mark.parametrize(
    ("first_s", "settled_s", "least_s", "most_s"),
    [
        pytest.param(0.02, 60.0, (0.02, 0.04, 0.08), 60.0, id="terms that fail at once"),
        pytest.param(0.5, 0.0, (0.5, 0.5, 0.5), 2.0, id="terms that lasted"),
    ],
)
async def test_pause_of_a_failing_planner_grows_unless_its_terms_last(
    cluster, pauses, first_s, settled_s, least_s, most_s
):
    pauses(first_s=first_s, settled_s=settled_s)
    hook = Failing(RuntimeError("a defect"), num_times=4)

    await fail(cluster, hook)
    await asyncio.wait_for(hook.is_waiting.wait(), 30)

    gaps = [later - sooner for sooner, later in itertools.pairwise(hook.failed_s)]
    assert all(gap >= least for gap, least in zip(gaps, least_s, strict=True)), gaps
    assert gaps[-1] < most_s


@pytest.mark.parametrize(
    ("error", "settled_s", "words", "recorded"),
    [
        (RuntimeError("a defect"), 60.0, "batcher .* cannot .*: a defect$", b"a defect"),
        (ValueError(), 60.0, r"batcher .* cannot .*: ValueError\(\)$", b"ValueError()"),
        (RuntimeError("a defect"), 0.1, "^(?!.*cannot)", b""),
        (FencedError("not ours"), 60.0, "^(?!.*cannot)", b""),
        (StoreUnavailableError("no answer"), 60.0, "^(?!.*cannot)", b""),
    ],
)
async def test_defect_that_ended_a_term_is_recorded_until_a_term_lasts(
    cluster, pauses, error, settled_s, words, recorded
):
    pauses(settled_s=settled_s)
    hook = Failing(error)
    run, batcher = await fail(cluster, hook)
    trainer = cluster.trainer(batcher, run)
    await trainer.start()
    await asyncio.wait_for(hook.is_waiting.wait(), 30)

    await trainer.refused(1, words=words)

    leader = keys.run_keys(run).leader
    await wait_until_async(
        lambda: (cluster.client.hget(leader, "planning_trouble") or b"") == recorded
    )


async def test_a_leader_whose_store_is_away_stops_without_a_complaint(
    cluster_at, own_server, caplog
):
    cluster = cluster_at(own_server.url)
    hook = Failing(RuntimeError(), num_times=0)
    _, batcher = await fail(cluster, hook)
    await asyncio.wait_for(hook.is_waiting.wait(), 30)
    await asyncio.to_thread(own_server.kill)

    async with asyncio.timeout(60):
        await batcher.stop()

    assert "Traceback" not in caplog.text


async def test_defect_is_raised_although_the_store_cannot_record_it(cluster, pauses, caplog):
    pauses()

    async def fail_and_break_the_leader(_: object) -> None:
        if not failures():  # the planner tries again
            cluster.client.set(keys.run_keys(run).leader, "no hash")
        raise RuntimeError("a defect")

    run = cluster.create_run(batch_groups=1)
    await cluster.start_batcher(before_write=fail_and_break_the_leader)
    await cluster.publish(run, group("g0"))

    def failures() -> list[Any]:
        return [each.exc_info for each in caplog.records if "planning of" in each.getMessage()]

    await wait_until_async(lambda: bool(failures()))
    cluster.client.delete(keys.run_keys(run).leader)
    assert failures()[0][0] is RuntimeError


async def test_planner_that_stops_cleanly_releases_its_lease(cluster):
    run = cluster.create_run(batch_groups=1)
    first = await cluster.start_batcher(lease_s=600)
    await cluster.publish(run, group("g0"))
    await cluster.planned(run, 1)

    await first.stop()
    second = await cluster.start_trainer(run, lease_s=600)
    await second.stepped(await second.get(1))
    await cluster.publish(run, group("g1"))
    (pulled,) = await second.get(2)

    assert pulled.mini_batch.rows.group_id == ["g1", "g1"]


async def test_chain_of_several_pages_is_read_whole_by_a_successor(cluster):
    num_steps = PAGE_MANIFESTS + 2
    run = cluster.create_run(batch_groups=1, max_planned_ahead=2 * num_steps)
    first = await cluster.start_batcher()
    await cluster.publish(run, *(group(f"g{i}") for i in range(num_steps)))
    await cluster.planned(run, num_steps)
    await first.stop()

    trainer = cluster.trainer(await cluster.start_batcher(), run)
    await cluster.publish(run, group("next"))
    await trainer.start()
    (pulled,) = await trainer.get(num_steps + 1)

    assert pulled.mini_batch.rows.group_id == ["next", "next"]
    assert pulled.mini_batch.rows.row_id.tolist() == [2 * num_steps, 2 * num_steps + 1]
