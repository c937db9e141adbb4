"""A budget delays producers and never the run: with any budget, steps are trained."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testkit.releases import release_payload
from turnstream.batching.fold.decisions import GroupEvaluated
from turnstream.errors import RejectedError, WaitKind
from turnstream.store.client.connection import connect_async
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import Purpose, TrajectoryKey, TrajectoryState
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.queries.ledger import read_budget
from turnstream_server.bus.queries.run_snapshot import read_snapshot
from turnstream_server.bus.release.release import advance_watermark
from turnstream_server.bus.sessions.observers import declare_observer, note_observed
from turnstream_server.bus.sessions.sessions import acknowledge_committed
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.slow

NUM_STEPS = 6
OVERHEAD = 4096


class _TrainedRun:
    """A run whose generators open each group that is admitted, and whose trainer trains them.

    Attributes:
        most_held: the most bytes that were held when a group was admitted.
        step_bytes: the bytes of each step's payload.
    """

    def __init__(self, run: Any, *, batch_groups: int, sizes: list[int], pass_rate: int) -> None:
        self.run = run
        self.batch_groups = batch_groups
        self.sizes = sizes
        self.pass_rate = pass_rate
        self.num_opened = 0
        self.ready: list[str] = []
        self.most_held = 0
        self.step_bytes: list[int] = []
        self.groups_of: list[list[str]] = []

    async def generate(self) -> None:
        """Open groups until one must wait; then seal them, and filter some."""
        begun: list[str] = []
        while len(begun) + len(self.ready) < 4 * self.batch_groups:
            group_id = f"g{self.num_opened}"
            try:
                await self.run.open(group_id)
            except RejectedError:
                break
            self.num_opened += 1
            begun.append(group_id)
            held = self.run.held()
            self.most_held = max(self.most_held, held.held)
        for group_id in begun:
            size = self.size(group_id)
            for sample in range(2):
                assert await self.run.grow(group_id, sample, size) >= size
                await self.run.seal(group_id, sample, num_bytes=size)
            if int(group_id[1:]) % self.pass_rate == 0:
                self.ready.append(group_id)
            else:
                await self.run.settle(group_id, TrajectoryState.FILTERED, 0, 1)
                await release_payload(self.run.client, self.run.name, ids([group_id]))

    def size(self, group_id: str) -> int:
        return self.sizes[int(group_id[1:]) % len(self.sizes)]

    async def train(self, session: Any, *, step: int, is_committed: bool) -> None:
        """Plan, train and perhaps commit the next step, and release the steps before it."""
        some, self.ready = self.ready[: self.batch_groups], self.ready[self.batch_groups :]
        await self.run.plan(*some)
        self.groups_of.append(some)
        self.step_bytes.append(sum(2 * (self.size(each) + OVERHEAD) for each in some))
        token = await self.run.step(session, step)
        if is_committed:
            client, name = self.run.client, self.run.name
            await acknowledge_committed(
                client, name, session_epoch=session.session_epoch, token=token
            )
            floor = await advance_watermark(Term(client, name, self.run.leader_epoch))
            for groups in self.groups_of[:floor]:
                await release_payload(client, name, ids(groups))


def ids(groups: list[str]) -> list[str]:
    return [TrajectoryKey(group, sample).trajectory_id for group in groups for sample in range(2)]


@pytest.mark.timeout(300)
@given(
    batch_groups=st.integers(1, 3),
    max_bytes=st.sampled_from([3 * OVERHEAD, 150_000, 500_000, 2_000_000]),
    sizes=st.lists(st.sampled_from([10, 20_000, 150_000]), min_size=1, max_size=3),
    commit_every=st.integers(1, 3),
    pass_rate=st.integers(1, 2),
)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_run_continues_with_any_budget(
    server: EmbeddedServer,
    start_run: Callable[..., Any],
    batch_groups: int,
    max_bytes: int,
    sizes: list[int],
    commit_every: int,
    pass_rate: int,
) -> None:
    async def train_all() -> _TrainedRun:
        async with connect_async(server.url) as client:
            run = await start_run(
                client,
                batch_groups=batch_groups,
                max_bytes=max_bytes,
                retain_checkpoints=1,
            )
            trained = _TrainedRun(run, batch_groups=batch_groups, sizes=sizes, pass_rate=pass_rate)
            session = await run.start("s")
            for step in range(1, NUM_STEPS + 1):
                num_rounds = 0
                while len(trained.ready) < batch_groups:
                    await trained.generate()
                    num_rounds += 1
                    assert num_rounds <= 2 * batch_groups * pass_rate, "no group is admitted"
                await trained.train(session, step=step, is_committed=step % commit_every == 0)
            return trained

    trained = asyncio.run(train_all())

    # Only kept steps and the groups of the awaited step may exceed the budget.
    most_kept = sum(sorted(trained.step_bytes)[-commit_every - 1 :])
    next_step = batch_groups * 2 * (65_536 + max(sizes) + OVERHEAD)
    assert trained.most_held <= max(max_bytes, most_kept + next_step)


def byte_reasons(client: redis.Redis, run: str, *, max_bytes: int = 0) -> dict[str, str]:
    """Return the sentences about bytes by kind, with another budget while nothing is starved."""
    seen = read_snapshot(client, run)
    config = replace(seen.config, max_bytes=max_bytes)
    found = reasons(replace(seen, config=config, num_ready=config.batch_groups))
    return {
        each.kind: each.sentence
        for each in found
        if each.kind in {WaitKind.OUT_OF_BYTES, WaitKind.BUDGET_TOO_SMALL}
    }


async def test_budget_below_the_kept_steps_is_reported_as_too_small(
    client: redis.Redis, run: Any
) -> None:
    await run.open("g")
    for sample in range(2):
        await run.seal("g", sample, num_bytes=1_000_000)
    await run.plan("g")

    small = byte_reasons(client, run.name, max_bytes=10_000)

    assert read_budget(client, run.name).planned == 2 * (1_000_000 + OVERHEAD)
    assert "max_bytes=10,000 is less than the 1 retained steps take" in small["budget_too_small"]
    assert "2,008,192 of max_bytes=10,000 are held" in small["out_of_bytes"]
    assert byte_reasons(client, run.name) == {}


async def test_too_small_budget_names_the_observer_of_the_oldest_step(
    client: redis.Redis, run: Any
) -> None:
    await run.plan_steps(2)
    session = await run.start("s")
    for observer in ("slow", "quick"):
        where = {"observer": observer, "first_step": 1, "expiry_s": 60}
        await declare_observer(run.client, run.name, **where)
    await note_observed(run.client, run.name, observer="quick", seen=2)

    early = byte_reasons(client, run.name, max_bytes=5_000)
    await run.commit(session, 1)
    late = byte_reasons(client, run.name, max_bytes=5_000)

    assert early["budget_too_small"].endswith("was seen by every observer")
    assert late["budget_too_small"].endswith(
        "was seen by every observer: 'slow' has seen step 0, and is forgotten in 60 s"
    )


async def test_released_bytes_wake_waiting_groups(run: Any) -> None:
    await run.open("g")
    await run.abandon("g", 0)
    before = await run.last_wake_up()

    await release_payload(run.client, run.name, ["g/0/0"])
    woken = await run.last_wake_up()
    await release_payload(run.client, run.name, ["g/0/0"])

    assert woken != before
    assert await run.last_wake_up() == woken


async def test_reservations_of_unopened_samples_are_released_with_their_group(run: Any) -> None:
    for group_id in ("planned", "dropped"):
        await run.open(group_id, num_samples=3, num_begun=2)
        for sample in range(2):
            await run.seal(group_id, sample)

    await run.plan("planned")
    await run.settle("dropped", TrajectoryState.FILTERED, 0, 1)

    held = run.held()
    assert held.reserved == 0


async def test_an_evaluation_holds_bytes_until_its_payload_is_released(run: Any) -> None:
    await run.open("e", num_samples=3, num_begun=2, purpose=Purpose.EVAL)
    await run.seal("e", 0, num_bytes=1_000)
    before = await run.last_wake_up()

    await run.carry_out(
        GroupEvaluated(group_id="e", keys=(TrajectoryKey("e", 0),), result=None, total=None)
    )
    ended = run.held()
    woken = await run.last_wake_up()
    await release_payload(run.client, run.name, ["e/0/0", "e/1/0"])

    assert (ended.reserved, ended.stored) == (65_536, 1_000 + OVERHEAD)
    assert woken != before
    assert run.held().held == 0
