"""A random history of a run, compared with a model of a few dictionaries after every call.

The laws:

- The states add up to the accepted trajectories, and the held bytes to the unreleased ones.
- A call that is sent twice acts once.
- A rollback moves batches back from committed and stepped to planned.
- A fenced writer changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from turnstream.batching.fold.decisions import GroupCut
from turnstream.errors import ConflictError, FencedError
from turnstream.store.client.connection import connect_async
from turnstream.store.client.scripts import run_command_async
from turnstream.types import RecoveryToken, TrajectoryKey, TrajectoryState
from turnstream_server.bus.admin.dead_letters import discard_trajectory_command
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.leadership.leadership import Term, acquire_leadership, release_leadership
from turnstream_server.embedded import EmbeddedServer

pytestmark = [pytest.mark.redis, pytest.mark.slow]

OPEN, SEALED, PLANNED = TrajectoryState.OPEN, TrajectoryState.SEALED, TrajectoryState.PLANNED
STEPPED, COMMITTED = TrajectoryState.STEPPED, TrajectoryState.COMMITTED
FILTERED, INCOMPLETE = TrajectoryState.FILTERED, TrajectoryState.INCOMPLETE
SURPLUS, ABANDONED = TrajectoryState.SURPLUS, TrajectoryState.ABANDONED
AWAITING, DEAD = TrajectoryState.AWAITING_REWARD, TrajectoryState.DEAD
DECIDED = "decided"
some = st.integers(0, 10**6)
"""Picks one of however many there are."""


class _Life(RuleBasedStateMachine):
    """Generators, planner and trainer of one run; `twice` and `refused` are how they act."""

    def __init__(self, url: str, start_run: Callable[[Any], Any]) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.client = connect_async(url)
        self.run: Any = self.loop.run(start_run(self.client))
        self.trajectories: dict[tuple[str, int], TrajectoryState] = {}
        self.groups: dict[str, str] = {}
        self.batches: list[list[tuple[str, int]]] = []
        self.not_begun: set[tuple[str, int]] = set()
        self.released: set[tuple[str, int]] = set()
        self.stepped = self.committed = self.num_sessions = self.num_leaders = 0
        self.session: Any = None
        self.lineages: set[str] = set()

    def teardown(self) -> None:
        self.loop.run(self.client.aclose())
        self.loop.close()

    # what the rules are made of

    def twice(self, act: Callable[[], Awaitable[Any]]) -> Any:
        """Act, and send the same again: the reply was lost."""
        first = self.loop.run(self.awaited(act))
        before = self.loop.run(self.run.dump())
        self.loop.run(self.awaited(act))
        assert self.loop.run(self.run.dump()) == before
        return first

    async def awaited(self, act: Callable[[], Awaitable[Any]]) -> Any:
        return await act()

    def refused(self, act: Callable[[], Awaitable[Any]], error: type[Exception]) -> None:
        before = self.loop.run(self.run.dump())
        with pytest.raises(error):
            self.loop.run(self.awaited(act))
        assert self.loop.run(self.run.dump()) == before

    def pick(self, number: int, *states: TrajectoryState) -> tuple[str, int]:
        found = [key for key, state in self.trajectories.items() if state in states]
        return found[number % len(found)]

    def has(self, *states: TrajectoryState) -> bool:
        return any(state in states for state in self.trajectories.values())

    def token(self, step: int) -> RecoveryToken:
        name = self.run.manifests[step].hash if step else ""
        return RecoveryToken(lineage="main", step=step, chain_hash=name)

    # generators

    @initialize()
    def first_group(self) -> None:
        self.open_group(2)

    @rule(num_samples=st.integers(1, 3))
    def open_group(self, num_samples: int) -> None:
        self.open_part(num_samples, num_samples)

    @rule(num_samples=st.integers(1, 3), num_begun=st.integers(0, 3))
    def open_part(self, num_samples: int, num_begun: int) -> None:
        group_id = f"g {len(self.groups)}"
        num_begun = min(num_begun, num_samples)
        self.twice(lambda: self.run.open(group_id, num_samples=num_samples, num_begun=num_begun))
        self.groups[group_id] = OPEN
        self.trajectories |= {(group_id, sample): OPEN for sample in range(num_begun)}
        self.not_begun |= {(group_id, sample) for sample in range(num_begun, num_samples)}

    @precondition(lambda self: self.has(OPEN))
    @rule(number=some, num_bytes=st.sampled_from([1, 50_000, 100_000]))
    def grow(self, number: int, num_bytes: int) -> None:
        key = self.pick(number, OPEN)
        assert self.twice(lambda: self.run.grow(*key, num_bytes)) >= num_bytes

    @precondition(lambda self: self.has(OPEN))
    @rule(number=some, num_bytes=st.integers(0, 200_000))
    def seal(self, number: int, num_bytes: int) -> None:
        key = self.pick(number, OPEN)
        self.twice(lambda: self.run.seal(*key, num_bytes=num_bytes))
        self.trajectories[key] = SEALED if self.groups[key[0]] == OPEN else SURPLUS

    @precondition(lambda self: self.has(OPEN))
    @rule(number=some)
    def seal_without_reward(self, number: int) -> None:
        key = self.pick(number, OPEN)
        self.twice(lambda: self.run.seal(*key, awaits_reward=True))
        self.trajectories[key] = AWAITING if self.groups[key[0]] == OPEN else SURPLUS

    @precondition(lambda self: self.has(AWAITING))
    @rule(number=some)
    def post_reward(self, number: int) -> None:
        key = self.pick(number, AWAITING)
        self.twice(lambda: self.run.post_reward(*key, 1.0))
        self.refused(lambda: self.run.post_reward(*key, 2.0), ConflictError)
        self.trajectories[key] = SEALED

    @precondition(lambda self: self.has(OPEN))
    @rule(number=some)
    def abandon(self, number: int) -> None:
        key = self.pick(number, OPEN)
        self.twice(lambda: self.run.abandon(*key))
        self.trajectories[key] = ABANDONED

    @precondition(lambda self: self.has(OPEN))
    @rule(number=some)
    def be_silent(self, number: int) -> None:
        key = self.pick(number, OPEN)
        name = TrajectoryKey(*key).trajectory_id
        self.loop.run(self.awaited(lambda: self.client.zadd(self.run.keys.leases, {name: 1})))
        self.twice(self.run.give_up)
        self.trajectories[key] = ABANDONED

    # the planner

    @precondition(lambda self: self.has(SEALED))
    @rule(number=some)
    def die(self, number: int) -> None:
        key = self.pick(number, SEALED)
        self.twice(lambda: self.run.kill(*key))
        self.trajectories[key] = DEAD

    @precondition(lambda self: any(state in {OPEN, DECIDED} for state in self.groups.values()))
    @rule(number=some, state=st.sampled_from([FILTERED, INCOMPLETE]))
    def drop(self, number: int, state: TrajectoryState) -> None:
        groups = [group for group, known in self.groups.items() if known in {OPEN, DECIDED}]
        group_id = groups[number % len(groups)]
        members = [key for key in self.trajectories if key[0] == group_id]
        samples = [sample for _, sample in members]
        self.twice(lambda: self.run.settle(group_id, state, *samples))
        self.groups[group_id] = state
        for key in members:
            if self.trajectories[key] in {SEALED, AWAITING}:
                self.trajectories[key] = state
        self.leave_open_ones_out(group_id)

    @precondition(lambda self: OPEN in self.groups.values())
    @rule(number=some)
    def cut(self, number: int) -> None:
        groups = [group for group, known in self.groups.items() if known == OPEN]
        group_id = groups[number % len(groups)]
        self.twice(lambda: self.run.carry_out(GroupCut(group_id=group_id, reason="enough")))
        self.groups[group_id] = DECIDED
        self.leave_open_ones_out(group_id)

    def leave_open_ones_out(self, group_id: str) -> None:
        self.not_begun = {key for key in self.not_begun if key[0] != group_id}
        for key, state in self.trajectories.items():
            if key[0] == group_id and state in {OPEN, AWAITING}:
                self.trajectories[key] = SURPLUS

    @precondition(lambda self: self.has(SEALED))
    @rule(number=some)
    def leave_over(self, number: int) -> None:
        group_id, sample = self.pick(number, SEALED)
        self.twice(lambda: self.run.settle(group_id, SURPLUS, sample))
        self.trajectories[group_id, sample] = SURPLUS

    @precondition(lambda self: self.has(FILTERED, INCOMPLETE, SURPLUS, ABANDONED))
    @rule(number=some)
    def release_what_ended(self, number: int) -> None:
        key = self.pick(number, FILTERED, INCOMPLETE, SURPLUS, ABANDONED)
        self.twice(lambda: self.run.release(key))
        self.released.add(key)

    @precondition(lambda self: self.has(DEAD))
    @rule(number=some)
    def discard(self, number: int) -> None:
        key = self.pick(number, DEAD)
        letter = discard_trajectory_command(self.run.name, TrajectoryKey(*key).trajectory_id)
        self.twice(lambda: run_command_async(self.client, letter))
        self.twice(lambda: self.run.release(key))
        self.released.add(key)

    @precondition(lambda self: self.committed)
    @rule()
    def release_what_is_committed(self) -> None:
        released = [key for keys in self.batches[: self.committed] for key in keys]
        self.twice(lambda: self.run.release(*released))
        self.released |= set(released)

    @precondition(lambda self: self.has(SEALED))
    @rule(numbers=st.lists(some, min_size=1, max_size=4))
    def plan(self, numbers: list[int]) -> None:
        keys = sorted({self.pick(number, SEALED) for number in numbers})
        self.twice(self.planning(keys, step=len(self.batches) + 1))
        self.batches.append(keys)
        for key in keys:
            self.trajectories[key] = PLANNED
            self.groups[key[0]] = PLANNED
        for group_id, _ in keys:
            self.leave_open_ones_out(group_id)

    @precondition(lambda self: self.has(SEALED) and len(set(self.trajectories.values())) > 1)
    @rule(number=some, other=some)
    def plan_what_is_not_sealed(self, number: int, other: int) -> None:
        states = set(self.trajectories.values()) - {SEALED}
        keys = [self.pick(number, SEALED), self.pick(other, *states)]
        self.refused(self.planning(keys, step=len(self.batches) + 1), ConflictError)

    def planning(self, keys: list[tuple[str, int]], *, step: int) -> Callable[[], Any]:
        return lambda: self.run.plan_members(*keys, step=step)

    @rule(number=some)
    def another_planner_takes_over(self, number: int) -> None:
        name, client, old = self.run.name, self.client, self.run.leader_epoch
        owner = "p" if self.num_leaders == 0 else f"p{self.num_leaders}"
        self.num_leaders += 1
        self.loop.run(release_leadership(Term(client, name, old), owner=owner))
        new = self.loop.run(
            acquire_leadership(client, name, owner=f"p{self.num_leaders}", lease_s=60)
        )
        self.run.leader_epoch = new.epoch
        if self.has(SEALED):
            group_id, sample = self.pick(number, SEALED)
            self.refused(
                lambda: self.run.settle(group_id, SURPLUS, sample, leader_epoch=old),
                FencedError,
            )

    # the trainer

    @rule(number=some, is_without_token=st.booleans())
    def start(self, number: int, is_without_token: bool) -> None:
        step = number % (len(self.batches) + 1)
        self.num_sessions += 1
        name = f"session {self.num_sessions}"
        old = self.session
        if is_without_token and self.committed > 0:
            self.refused(lambda: self.run.start(name), ConflictError)
            return
        token = None if is_without_token else self.token(step)
        step = 0 if is_without_token else step
        self.session = self.twice(lambda: self.run.start(name, token))
        assert self.session.next_step == step + 1
        assert (self.session.lineage in self.lineages) == (step == self.stepped and old is not None)
        self.lineages.add(self.session.lineage)
        self.stepped = self.committed = step
        if old is not None and self.batches:
            self.refused(lambda: self.run.step(old, 1), FencedError)

    @precondition(lambda self: self.session and self.stepped < len(self.batches))
    @rule()
    def step(self) -> None:
        self.twice(lambda: self.run.step(self.session, self.stepped + 1))
        self.stepped += 1

    @precondition(lambda self: self.session and self.stepped + 1 < len(self.batches))
    @rule()
    def leave_a_step_out(self) -> None:
        self.refused(lambda: self.run.step(self.session, self.stepped + 2), ConflictError)

    @precondition(lambda self: self.session and self.batches)
    @rule(number=some)
    def step_with_another_manifest(self, number: int) -> None:
        step = min(self.stepped, len(self.batches) - 1) + 1
        self.refused(
            lambda: self.run.step(self.session, step, manifest_hash=f"{number}"), ConflictError
        )

    @precondition(lambda self: self.session)
    @rule(number=some)
    def commit(self, number: int) -> None:
        step = number % (self.stepped + 1)
        self.twice(lambda: self.run.commit_token(self.session, self.token(step)))
        self.committed = max(self.committed, step)

    # the laws

    @invariant()
    def states_are_those_of_the_model_and_add_up(self) -> None:
        expected = Counter(self.trajectories.values())
        for step, keys in enumerate(self.batches, start=1):
            if step <= self.stepped:
                state = COMMITTED if step <= self.committed else STEPPED
                expected[PLANNED] -= len(keys)
                expected[state] += len(keys)

        counts = self.run.ledger()

        counts.check()
        assert counts.accepted == len(self.trajectories)
        assert +Counter(counts.by_state) == +expected

    @invariant()
    def what_is_open_has_a_lease_and_nothing_else_has(self) -> None:
        leased = self.loop.run(
            self.awaited(lambda: self.client.zrange(self.run.keys.leases, 0, -1))
        )

        open_ids = [
            TrajectoryKey(*key) for key, state in self.trajectories.items() if state == OPEN
        ]
        assert {name.decode() for name in leased} == {key.trajectory_id for key in open_ids}

    @invariant()
    def what_is_held_is_what_is_not_released_and_its_sums_are_kept(self) -> None:
        entries = self.loop.run(self.awaited(lambda: self.client.hgetall(self.run.keys.held)))
        kept = self.run.held()
        held = {
            name.decode(): (value[:1] == b"r", int(value.strip(b"r")))
            for name, value in entries.items()
        }

        keys = (self.trajectories.keys() | self.not_begun) - self.released
        assert held.keys() == {TrajectoryKey(*key).trajectory_id for key in keys}
        sums: Counter[str] = Counter()
        for key in keys:
            is_reserved, num_bytes = held[TrajectoryKey(*key).trajectory_id]
            is_planned = self.trajectories.get(key) == PLANNED
            part = "reserved" if is_reserved else "planned" if is_planned else "stored"
            sums[part] += num_bytes
        assert +sums == +Counter(
            {"reserved": kept.reserved, "stored": kept.stored, "planned": kept.planned}
        )

    @invariant()
    def the_frontier_is_that_of_the_model(self) -> None:
        found = self.loop.run(read_frontier_async(self.client, self.run.name))

        dropped = sum(state in {FILTERED, INCOMPLETE} for state in self.groups.values())
        progress = (found.planned, found.stepped, found.committed)
        assert progress == (len(self.batches), self.stepped, self.committed)
        assert found.num_opened_groups == len(self.groups)
        assert found.num_live_groups == len(self.groups) - dropped
        assert found.num_open_groups == self.num_open_in_the_store()

    def num_open_in_the_store(self) -> int:
        groups = self.loop.run(self.awaited(lambda: self.client.hvals(self.run.keys.groups)))
        return sum(entry.endswith(b":open") for entry in groups)


@pytest.mark.timeout(300)
def test_the_ledger_follows_the_model_through_a_random_life(
    server: EmbeddedServer, start_run: Callable[[Any], Any]
) -> None:
    class LifeOnThisServer(_Life):
        def __init__(self) -> None:
            super().__init__(server.url, start_run)

    run_state_machine_as_test(
        LifeOnThisServer,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
