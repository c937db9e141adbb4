"""A run in a real store, driven by the scripts of generators, planner and trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from testkit import manifest, sealed, trajectory_plan
from testkit.releases import release_payload
from testkit.run_driver import RunCommands
from turnstream.batching.fold.decisions import GroupDropped, MemberDropped, RefillWanted
from turnstream.batching.merge.plan import GroupPlan
from turnstream.records.compact import compact_batch, encode_batch, encode_ends
from turnstream.records.events import decode_event, encode_event
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.store.client.fullness import Bytes
from turnstream.store.client.scripts import run_command_async
from turnstream.store.run.budget import reserve_command, settled_lease
from turnstream.store.run.rewards import RewardOutcome, post_reward_async
from turnstream.types import (
    Event,
    Purpose,
    RecoveryToken,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
)
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.leadership.leadership import Term, acquire_leadership
from turnstream_server.bus.leadership.snapshots import save_snapshot
from turnstream_server.bus.planning.deadlines import abandon_lapsed, fire_deadlines
from turnstream_server.bus.planning.groups import Settlement, grant_refill, settle_groups
from turnstream_server.bus.planning.manifests import (
    StoredManifest,
    encode_for_store,
    write_manifest,
)
from turnstream_server.bus.planning.trajectories import mark_dead
from turnstream_server.bus.queries.ledger import LedgerCounts, read_budget, read_ledger
from turnstream_server.bus.release.release import (
    advance_watermark,
    finish_batches,
    fold_batches,
    fold_ended,
)
from turnstream_server.bus.sessions.sessions import (
    TrainerSession,
    acknowledge_committed,
    acknowledge_stepped,
    start_session,
)
from turnstream_server.embedded import EmbeddedServer


@pytest.fixture
async def async_client(server: EmbeddedServer) -> AsyncIterator[redis.asyncio.Redis]:
    """An asyncio client of `server`."""
    async with connect_async(server.url) as client:
        yield client


@pytest.fixture
def start_run(client: redis.Redis, new_run: Callable[..., str]) -> Callable[..., Awaitable[LedRun]]:
    """Makes a new run of batches of one group, led by the planner "p"."""

    async def start(async_client: redis.asyncio.Redis, **fields: Any) -> LedRun:
        name = new_run(client, **{"batch_groups": 1, "max_staleness": 1000, **fields})
        leadership = await acquire_leadership(async_client, name, owner="p", lease_s=60)
        return LedRun(async_client, name, leadership.epoch, store=client)

    return start


@pytest.fixture
async def run(
    async_client: redis.asyncio.Redis, start_run: Callable[..., Awaitable[LedRun]]
) -> LedRun:
    """A new run."""
    return await start_run(async_client)


@pytest.fixture
async def released(run: LedRun) -> LedRun:
    """A run of four steps, committed at 1, 2 and 3, of which step 1 and 2 are released."""
    await run.plan_steps(4)
    session = await run.start("s")
    await run.commit(session, 1, 2, 3)
    assert await run.advance_watermark() == 2
    return run


class LedRun:
    """A run that the planner "p" leads, and the calls of all its processes.

    Attributes:
        client: of the store.
        store: a client that is not of asyncio.
        manifests: by step.
    """

    def __init__(
        self, client: redis.asyncio.Redis, name: str, leader_epoch: int, *, store: redis.Redis
    ) -> None:
        self.client = client
        self.store = store
        self.name = name
        self.commands = RunCommands(name)
        self.keys = self.commands.keys
        self.leader_epoch = leader_epoch
        self.manifests: dict[int, StoredManifest] = {}

    @property
    def term(self) -> Term:
        """The term of the planner that leads the run."""
        return self.term_of(self.leader_epoch)

    def term_of(self, leader_epoch: int) -> Term:
        """A term of the run with this epoch."""
        return Term(self.client, self.name, leader_epoch)

    async def open(
        self,
        group_id: str,
        *,
        num_samples: int = 2,
        num_needed: int = 0,
        attempt: int = 0,
        purpose: Purpose = Purpose.TRAIN,
        num_begun: int | None = None,
    ) -> None:
        """Open a group and the first `num_begun` of its samples; None for all."""
        ids = [
            keys.trajectory_id(TrajectoryKey(group_id, sample, attempt))
            for sample in range(num_samples if num_begun is None else num_begun)
        ]
        sizes = {"num_samples": num_samples, "num_needed": num_needed}
        command = self.commands.open_samples(
            group_id, *ids, **sizes, purpose=purpose, writer="writer"
        )
        await run_command_async(self.client, command)

    async def append(self, *records: bytes, lease: str = "1:writer", **where: Any) -> int:
        """Append to a trajectory, g/0/0 by default."""
        command = self.commands.append(*records, lease=lease, **where)
        return await run_command_async(self.client, command)

    async def grow(self, group_id: str, sample: int, num_bytes: int) -> int:
        """Ask room for so many bytes of an open trajectory."""
        wanted = [(TrajectoryKey(group_id, sample).trajectory_id, 1, num_bytes)]
        (granted,) = await run_command_async(self.client, reserve_command(self.name, wanted))
        return granted

    async def seal(
        self,
        group_id: str,
        sample: int,
        *,
        attempt: int = 0,
        awaits_reward: bool = False,
        num_bytes: int = 100,
    ) -> list[bytes]:
        """Post the seal of an open trajectory."""
        trajectory = dataclasses.replace(
            sealed(group_id, sample=sample, attempt=attempt), awaits_reward=awaits_reward
        )
        command = self.commands.post_sealed(
            keys.trajectory_id(trajectory.key),
            settled_lease(1, "", awaits_reward=awaits_reward, num_bytes=num_bytes),
            encode_event(trajectory),
        )
        return await run_command_async(self.client, command)

    async def abandon(self, group_id: str, sample: int) -> None:
        """Give an open trajectory up."""
        key = TrajectoryKey(group_id, sample)
        record = encode_event(TrajectoryAbandoned(key=key, reason="crashed"))
        command = self.commands.abandon(keys.trajectory_id(key), reason="crashed", record=record)
        await run_command_async(self.client, command)

    async def kill(self, group_id: str, sample: int) -> bool:
        """Set a sealed trajectory aside."""
        died = TrajectoryDied(key=TrajectoryKey(group_id, sample), reason="checksum")
        return await mark_dead(self.term, died)

    async def settle(self, group_id: str, state: TrajectoryState, *samples: int) -> None:
        """Drop a group, or its surplus."""
        keys = tuple(TrajectoryKey(group_id, sample) for sample in samples)
        settled: list[Settlement] = [
            GroupDropped(group_id=group_id, state=state, reason="why", keys=keys)
        ]
        if state == TrajectoryState.SURPLUS:
            settled = [MemberDropped(key=key, state=state, reason="why") for key in keys]
        await self.carry_out(*settled)

    async def carry_out(self, *settled: Settlement) -> None:
        """Settle what was decided."""
        await settle_groups(self.term, settled)

    async def grant(
        self,
        group_id: str,
        sample: int,
        *,
        attempt: int = 1,
        number: int = 1,
    ) -> bool:
        """Grant a refill."""
        wanted = RefillWanted(
            key=TrajectoryKey(group_id, sample, attempt), prompt_uid="uid", number=number
        )
        return await grant_refill(self.term, wanted)

    async def server_ms(self) -> int:
        """Return the time of the store."""
        seconds, microseconds = await self.client.time()
        return seconds * 1000 + microseconds // 1000

    async def seal_members(self, num_groups: int) -> list[str]:
        """Write groups of two sealed members to the ledger; return their names."""
        groups = [f"g{number}" for number in range(num_groups)]
        ids = [f"{group}/{sample}/0" for group in groups for sample in (0, 1)]
        pipeline = self.client.pipeline(transaction=False)
        pipeline.hset(self.keys.ledger, mapping=dict.fromkeys(ids, "sealed:1"))
        pipeline.hset(self.keys.groups, mapping=dict.fromkeys(groups, "2:open"))
        pipeline.hset(self.keys.counts, mapping={"sealed": len(ids), "accepted": len(ids)})
        await pipeline.execute()
        return groups

    async def run_ms(self) -> int:
        """The run's own time, which goes on by what a test says."""
        ms: Any = await self.client.hget(self.keys.clock, "ms")
        return int(ms)

    async def fire(self) -> int:
        """Fire the deadlines that have passed."""
        return await fire_deadlines(self.term, run_ms=await self.run_ms())

    async def make_due(self) -> None:
        """Let every deadline pass."""
        members: Any = await self.client.zrange(self.keys.deadlines, 0, -1)
        await self.client.zadd(self.keys.deadlines, dict.fromkeys(members, 1))

    async def post_reward(self, group_id: str, sample: int, reward: float) -> RewardOutcome:
        """Post a late reward."""
        key = TrajectoryKey(group_id, sample)
        return await post_reward_async(self.client, self.name, key, reward)

    async def plan(self, *group_ids: str, **fields: Any) -> StoredManifest:
        """Plan the next step from samples 0 and 1 of these groups; `fields` replace its own."""
        stored = await self.try_to_plan(*group_ids, **fields)
        assert stored is not None, "the step must be planned anew"
        return stored

    async def try_to_plan(self, *group_ids: str, **fields: Any) -> StoredManifest | None:
        """The same; None if the step must be planned again."""
        step = fields.pop("step", max(self.manifests, default=0) + 1)
        before = self.manifests.get(step - 1)
        fields.setdefault("previous_hash", before.hash if before else "")
        fields.setdefault("lineage", (await read_frontier_async(self.client, self.name)).lineage)
        plan = dataclasses.replace(manifest(*group_ids, run=self.name, step=step), **fields)
        stored = encode_for_store(plan)
        if not await write_manifest(self.term, stored):
            return None
        self.manifests[step] = stored
        return stored

    async def plan_members(self, *members: tuple[str, int], step: int) -> StoredManifest:
        """Plan a step from these samples of groups."""
        groups = tuple(
            GroupPlan(
                group_id=group_id,
                prompt_uid="",
                trajectories=tuple(
                    trajectory_plan(group_id, sample=sample)
                    for group, sample in members
                    if group == group_id
                ),
            )
            for group_id in dict.fromkeys(group for group, _ in members)
        )
        return await self.plan(groups=groups, step=step)

    async def plan_steps(self, num_steps: int) -> None:
        """Plan steps of one new group each."""
        for _ in range(num_steps):
            group_id = f"g{max(self.manifests, default=0) + 1}"
            await self.open(group_id)
            for sample in range(2):
                await self.seal(group_id, sample)
            await self.plan(group_id)

    async def commit(self, session: TrainerSession, *steps: int) -> None:
        """Acknowledge these steps, those between them too, and a checkpoint after each of them."""
        for step in range(1, max(steps) + 1):
            token = await self.step(session, step)
            if step in steps:
                await self.commit_token(session, token)

    def token(self, step: int) -> RecoveryToken:
        """The token of a planned step."""
        return RecoveryToken(lineage="main", step=step, chain_hash=self.manifests[step].hash)

    async def start(self, session: str, token: RecoveryToken | None = None) -> TrainerSession:
        """Begin a trainer session of one rank."""
        return await start_session(
            self.client, self.name, session=session, dp_world_size=1, token=token
        )

    async def step(
        self, session: TrainerSession, step: int, *, manifest_hash: str = "", dp_rank: int = 0
    ) -> RecoveryToken:
        """Acknowledge a step, of its own manifest where no other is named."""
        return await acknowledge_stepped(
            self.client,
            self.name,
            session_epoch=session.session_epoch,
            step=step,
            manifest_hash=manifest_hash or self.manifests[step].hash,
            dp_rank=dp_rank,
        )

    async def commit_token(
        self, session: TrainerSession, token: RecoveryToken, *, dp_rank: int = 0
    ) -> None:
        """Acknowledge a checkpoint."""
        epoch = session.session_epoch
        await acknowledge_committed(
            self.client, self.name, session_epoch=epoch, token=token, dp_rank=dp_rank
        )

    async def frontier(self) -> tuple[int, int, int]:
        """The newest step that is planned, stepped, committed."""
        found = await read_frontier_async(self.client, self.name)
        return found.planned, found.stepped, found.committed

    def ledger(self) -> LedgerCounts:
        """The counts of the ledger."""
        return read_ledger(self.store, self.name)

    def held(self) -> Bytes:
        """The bytes that the run holds."""
        return read_budget(self.store, self.name)

    async def trained(self) -> tuple[int, int, int]:
        """How many trajectories are planned, stepped, committed; all states must add up."""
        counts = self.ledger()
        counts.check()
        return (
            counts.by_state[TrajectoryState.PLANNED],
            counts.by_state[TrajectoryState.STEPPED],
            counts.by_state[TrajectoryState.COMMITTED],
        )

    async def advance_watermark(self, *, at_most: int | None = None) -> int:
        """Release the steps that no checkpoint can ask for."""
        return await advance_watermark(self.term, at_most=at_most)

    async def give_up(self) -> None:
        """Give up what lapsed in the first millisecond of all time: what a test let lapse."""
        await abandon_lapsed(self.term, until_ms=1)

    async def release(self, *members: tuple[str, int]) -> None:
        """Remove the payload of these samples of groups, and release their bytes."""
        ids = [TrajectoryKey(*member).trajectory_id for member in members]
        await release_payload(self.client, self.name, ids)

    async def fold(self, step: int) -> None:
        """Everything that a leader does with a released step."""
        stored = self.manifests[step]
        record = encode_batch(compact_batch(stored.manifest, manifest_hash=stored.hash))
        await save_snapshot(self.term, position="0-0", step=step, record=b"")
        await fold_batches(self.term, [stored.manifest])
        await finish_batches(self.term, {step: record})

    async def fold_ends(self, *ids: str, number: int = 1) -> bool:
        """Leave a compact record of trajectories that ended untrained."""
        record = encode_ends(dict.fromkeys(map(keys.parse_trajectory_id, ids), "x"))
        return await fold_ended(self.term, ids, number=number, record=record)

    async def hash_of(self, name: str) -> dict[bytes, bytes]:
        """Return a hash of the run."""
        found: Any = await self.client.execute_command("HGETALL", getattr(self.keys, name))
        return found

    async def events(self) -> list[Event]:
        """Every event of the run, in order."""
        entries: Any = await self.client.execute_command("XRANGE", self.keys.events, "-", "+")
        return [decode_event(fields[b"r"]) for _, fields in entries]

    async def dump(self) -> dict[str, Any]:
        """Everything that the store holds of the run, but for the id of the last wake-up."""
        content: dict[str, Any] = {}
        for name in (
            *("ledger", "counts", "groups", "frontier", "batches", "leader", "clock"),
            *("members", "rewards", "past", "ended", "reasons", "over", "snapshot", "observers"),
            "times",
        ):
            content[name] = await self.client.execute_command("HGETALL", getattr(self.keys, name))
        for name in ("deadlines", "refills", "leases"):
            content[name] = await self.client.zrange(getattr(self.keys, name), 0, -1)
        for name in ("events", "plan", "versions", "wake"):
            content[name] = await self.client.xrange(getattr(self.keys, name))
        return content

    async def last_wake_up(self) -> Any:
        """The newest entry of the wake stream."""
        return await self.client.execute_command("XRANGE", self.keys.wake, "-", "+")
