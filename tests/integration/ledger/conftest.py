"""A run in a real store, driven by the scripts of generators, planner and trainer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import redis
import redis.asyncio

from harness.stored import content_of
from testkit import manifest, sealed
from testkit.runs.run_driver import RunCommands
from testkit.services import servers
from turnstream.batching.fold.decisions import GroupDropped, MemberDropped, RefillWanted
from turnstream.records.compact import compact_batch, encode_batch, encode_ends
from turnstream.records.events import decode_event, encode_event
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.store.client.fullness import Bytes
from turnstream.store.client.scripts import run_command_async
from turnstream.store.run.groups import settled_lease
from turnstream.store.run.rewards import (
    RewardOutcome,
    encode_reward,
    outcome_of,
    post_reward_command,
)
from turnstream.types import (
    Event,
    Purpose,
    RecoveryToken,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
)
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.core.frontier import Frontier, read_frontier
from turnstream_server.ledger.leadership.leader_fields import save_snapshot
from turnstream_server.ledger.leadership.writes import Term, acquire_leadership
from turnstream_server.ledger.planning.deadlines import fire_deadlines
from turnstream_server.ledger.planning.groups import Settlement, grant_refill, settle_groups
from turnstream_server.ledger.planning.manifests import (
    StoredManifest,
    encode_for_store,
    write_manifest,
)
from turnstream_server.ledger.planning.trajectories import mark_dead
from turnstream_server.ledger.queries.ledger import LedgerCounts, read_budget, read_ledger
from turnstream_server.ledger.release.release import (
    advance_watermark,
    compact_batches,
    compact_ended,
    finish_batches,
    release_payload,
)
from turnstream_server.ledger.sessions.session_writes import TrainerRank, TrainerSession
from turnstream_server.ledger.sessions.sessions import (
    acknowledge_committed,
    acknowledge_stepped,
    start_session,
)

server, own_server = servers.server_of_each_kind, servers.own_server_of_each_kind


@pytest.fixture
async def async_client(server: EmbeddedServer) -> AsyncIterator[redis.asyncio.Redis]:
    """An asyncio client of `server`."""
    async with connect_async(server.url) as client:
        yield client


@pytest.fixture
def start_run(
    client: redis.Redis, async_client: redis.asyncio.Redis, new_run: Callable[..., str]
) -> Callable[..., Awaitable[LedRun]]:
    """Makes a new run of batches of one group, led by the planner "p"."""

    async def start(**fields: Any) -> LedRun:
        name = new_run(client, **{"batch_groups": 1, "max_staleness": 1000, **fields})
        leadership = await acquire_leadership(async_client, name, owner="p", lease_s=60)
        return LedRun(async_client, name, leadership.epoch, store=client)

    return start


@pytest.fixture
async def run(start_run: Callable[..., Awaitable[LedRun]]) -> LedRun:
    """A new run."""
    return await start_run()


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
        client: asyncio client of the store.
        store: client without asyncio.
        manifests: the written ones by step.
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

    def run_named(self, name: str) -> LedRun:
        """Another run of the same store, which no planner leads."""
        return LedRun(self.client, name, 0, store=self.store)

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
        num_opened: int | None = None,
        num_sealed: int = 0,
    ) -> None:
        """Open a group and the first `num_opened` of its samples, None for all; seal the first."""
        ids = [
            keys.trajectory_id(TrajectoryKey(group_id, sample, attempt))
            for sample in range(num_samples if num_opened is None else num_opened)
        ]
        sizes = {"num_samples": num_samples, "num_needed": num_needed}
        command = self.commands.open_samples(
            group_id, *ids, **sizes, purpose=purpose, writer="writer"
        )
        await run_command_async(self.client, command)
        for sample in range(num_sealed):
            await self.seal(group_id, sample)

    async def append(self, *records: bytes, lease: str = "1:writer", **where: Any) -> int:
        """Append to a trajectory, g/0/0 by default."""
        command = self.commands.append(*records, lease=lease, **where)
        return await run_command_async(self.client, command)

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
        trajectory = replace(
            sealed(group_id, sample=sample, attempt=attempt), awaits_reward=awaits_reward
        )
        command = self.commands.post_sealed(
            keys.trajectory_id(trajectory.key),
            settled_lease(1, "", awaits_reward=awaits_reward, num_bytes=num_bytes),
            encode_event(trajectory),
        )
        return await run_command_async(self.client, command)

    async def abandon(self, group_id: str, sample: int) -> None:
        """Abandon an open trajectory."""
        key = TrajectoryKey(group_id, sample)
        record = encode_event(TrajectoryAbandoned(key=key, reason="crashed"))
        command = self.commands.abandon(keys.trajectory_id(key), reason="crashed", record=record)
        await run_command_async(self.client, command)

    async def kill(self, group_id: str, sample: int) -> bool:
        """Mark a sealed trajectory as dead."""
        died = TrajectoryDied(key=TrajectoryKey(group_id, sample), reason="checksum")
        return await mark_dead(self.term, died)

    async def settle(self, group_id: str, state: TrajectoryState, *samples: int) -> None:
        """Drop a group, or its surplus."""
        keys = tuple(TrajectoryKey(group_id, sample) for sample in samples)
        fields: Any = {"state": state, "reason": "why"}
        if state == TrajectoryState.SURPLUS:
            await self.carry_out(*(MemberDropped(key=key, **fields) for key in keys))
        else:
            await self.carry_out(GroupDropped(group_id=group_id, keys=keys, **fields))

    async def carry_out(self, *settled: Settlement) -> None:
        """Settle what was decided."""
        await settle_groups(self.term, settled)

    async def grant(self, group_id: str, sample: int, *, attempt: int = 1, number: int = 1) -> bool:
        """Grant a refill."""
        wanted = RefillWanted(
            key=TrajectoryKey(group_id, sample, attempt), prompt_uid="uid", number=number
        )
        return await grant_refill(self.term, wanted)

    async def server_ms(self) -> int:
        """Return the time of the store."""
        seconds, microseconds = await self.client.time()
        return seconds * 1000 + microseconds // 1000

    async def run_ms(self) -> int:
        """The run's own time, which only a tick advances."""
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
        command = post_reward_command(self.name, *encode_reward(key, reward, None))
        return outcome_of(await run_command_async(self.client, command))

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
        fields.setdefault("lineage", self.read_frontier().lineage)
        plan = replace(manifest(*group_ids, run=self.name, step=step), **fields)
        stored = encode_for_store(plan)
        if not await write_manifest(self.term, stored):
            return None
        self.manifests[step] = stored
        return stored

    async def plan_steps(self, num_steps: int) -> None:
        """Plan steps of one new group each."""
        for _ in range(num_steps):
            group_id = f"g{max(self.manifests, default=0) + 1}"
            await self.open(group_id, num_sealed=2)
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

    async def start(
        self, session: str, token: RecoveryToken | None = None, *, dp_world_size: int = 1
    ) -> TrainerSession:
        """Start a trainer session, of one rank by default."""
        fields: Any = {"session": session, "dp_world_size": dp_world_size, "token": token}
        return await start_session(self.client, self.name, **fields)

    async def step(
        self, session: TrainerSession, step: int, *, manifest_hash: str = "", dp_rank: int = 0
    ) -> RecoveryToken:
        """Acknowledge a step, of its own manifest where no other is named."""
        manifest_hash = manifest_hash or self.manifests[step].hash
        caller = TrainerRank(session.session_epoch, "", dp_rank)
        stepped = await acknowledge_stepped(
            self.client, self.name, caller, step=step, manifest_hash=manifest_hash
        )
        return stepped.token

    async def commit_token(
        self, session: TrainerSession, token: RecoveryToken, *, dp_rank: int = 0
    ) -> None:
        """Acknowledge a checkpoint."""
        caller = TrainerRank(session.session_epoch, "", dp_rank)
        await acknowledge_committed(self.client, self.name, caller, token)

    async def frontier(self) -> tuple[int, int, int]:
        """The newest step that is planned, stepped, committed."""
        found = self.read_frontier()
        return found.planned, found.stepped, found.committed

    def read_frontier(self) -> Frontier:
        """All numbers of the frontier."""
        return read_frontier(self.store, self.name)

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
        states = (TrajectoryState.PLANNED, TrajectoryState.STEPPED, TrajectoryState.COMMITTED)
        planned, stepped, committed = (counts.by_state[state] for state in states)
        return planned, stepped, committed

    async def advance_watermark(self, *, at_most: int | None = None) -> int:
        """Release the steps that no checkpoint can ask for."""
        return await advance_watermark(self.term, at_most=at_most)

    async def release(self, *ids: str, lease_s: float = 60.0, **options: Any) -> None:
        """Delete the payload of these trajectories, and release their bytes."""
        await release_payload(self.term, ids, lease_s=lease_s, **options)

    async def compact(self, step: int) -> None:
        """Everything that a leader does with a released step."""
        stored = self.manifests[step]
        record = encode_batch(compact_batch(stored.manifest, manifest_hash=stored.hash))
        await save_snapshot(self.term, position="0-0", step=step, record=b"")
        await compact_batches(self.term, [stored.manifest])
        await finish_batches(self.term, {step: record})

    async def fold_ends(self, *ids: str, number: int = 1) -> bool:
        """Leave a compact record of trajectories that ended untrained."""
        record = encode_ends(dict.fromkeys(map(keys.parse_trajectory_id, ids), "x"))
        return await compact_ended(self.term, ids, number=number, record=record)

    async def hash_of(self, name: str) -> dict[bytes, bytes]:
        """Return a hash of the run."""
        found: Any = await self.client.execute_command("HGETALL", getattr(self.keys, name))
        return found

    async def events(self) -> list[Event]:
        """Every event of the run, in order."""
        entries: Any = await self.client.execute_command("XRANGE", self.keys.events, "-", "+")
        return [decode_event(fields[b"r"]) for _, fields in entries]

    def dump(self) -> dict[str, Any]:
        """Return the content of every key of the run, except the count of refused writes."""
        names = self.keys._replace(conflicts="")._asdict()
        return {name: content_of(self.store, key) for name, key in names.items() if key}

    @contextlib.asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """Check that the block changes no key of the run."""
        before = self.dump()
        yield
        assert self.dump() == before

    @contextlib.asynccontextmanager
    async def refuses(self, error: type[Exception], match: str) -> AsyncIterator[None]:
        """Check that the block raises this error, and changes no key of the run."""
        async with self.unchanged():
            with pytest.raises(error, match=match):
                yield

    @contextlib.asynccontextmanager
    async def full_server(self) -> AsyncIterator[None]:
        """The server refuses writes that take memory during the block."""
        await self.client.config_set("maxmemory", 1)
        try:
            yield
        finally:
            await self.client.config_set("maxmemory", 0)

    async def last_wake_up(self) -> Any:
        """The newest entry of the wake stream."""
        return await self.client.execute_command("XRANGE", self.keys.wake, "-", "+")
