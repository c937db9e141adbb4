"""Batcher replicas on a real store, called over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import grpc
import grpc.aio
import pytest

import testkit
from testkit.scripts import script
from turnstream.batching.config import BatchingConfig
from turnstream.errors import NotReadyError
from turnstream.generator import Publisher
from turnstream.records.batches import decode_mini_batch
from turnstream.records.events import encode_event
from turnstream.records.statuses import status_to_error
from turnstream.records.turns import encode_turn
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.client.scripts import run_command
from turnstream.store.run.groups import group_size
from turnstream.store.run.runs import create_run
from turnstream.types import (
    Group,
    GroupOpened,
    MiniBatch,
    Purpose,
    RecoveryToken,
    StoredTurn,
    TrajectoryKey,
    TrajectoryState,
    TurnShape,
)
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner import reason_cache, releaser, snapshotting
from turnstream_server.batcher.planner.parking import PARK_AFTER_S
from turnstream_server.batcher.planner.snapshotting import DEFAULT_UPKEEP, Upkeep
from turnstream_server.batcher.serving import calls
from turnstream_server.batcher.serving.service import BatcherOptions, serving
from turnstream_server.bus.admin.dead_letters import DeadLetters, read_dead_letters
from turnstream_server.bus.core.frontier import Frontier, read_frontier
from turnstream_server.bus.queries.ledger import LedgerCounts, read_ledger
from turnstream_server.embedded import EmbeddedServer

_numbers = itertools.count(1)

Hook = Callable[[Any], Awaitable[object]]
_before_write: ContextVar[Hook | None] = ContextVar("before_write", default=None)
_before_act: ContextVar[Hook | None] = ContextVar("before_act", default=None)
_ACTS = {
    releaser: {
        "advance_watermark": "advance_watermark",
        "remove_payload": "release_payload",
        "give_back": "give_back",
        "fold_batches": "fold_batch",
        "finish_batches": "finish_batch",
        "fold_ended": "fold_ended",
    },
    snapshotting: {"save_snapshot": "save_snapshot", "trim_events": "trim_events"},
}
"""Names of the acts of a leader's upkeep by the functions that do them."""

# A batcher process that dies or stops at a failpoint: url, failpoint, and options as JSON.
BATCHER = """
import asyncio, json, sys
from pathlib import Path
from turnstream_server import failpoints
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.batcher.serving.service import BatcherOptions
from turnstream_server.batcher.serving.service import serving
from turnstream_server.bus.release.ledger_files import LedgerFolder

url, failpoint, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
failpoints.arm(failpoint)
upkeep = options.pop("upkeep", {})
if "folder" in upkeep:
    upkeep["ledger_folder"] = LedgerFolder(folder=Path(upkeep.pop("folder")), hot_batches=2)

async def main():
    made = BatcherOptions(redis_url=url, upkeep=Upkeep(**upkeep), **options)
    async with serving(made) as address:
        print(address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """A server for each test: a replica meets every run that its store has."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture(autouse=True)
def a_busy_store_answers_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of a test wait for answers of their store as long as its machine may take."""
    monkeypatch.setattr(reason_cache, "_READ_TIMEOUT_S", 30.0)
    monkeypatch.setattr(reason_cache, "_READ_EVERY_S", 0.0)
    monkeypatch.setattr(calls, "_LEAST_ANSWER_S", 30.0)


@pytest.fixture(autouse=True)
def hooks_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Await the hooks of a replica: after the check of a plan, and before each act of upkeep."""
    check = Assembler.check

    async def check_and_wait(self: Assembler, batch: PlannedBatch) -> None:
        await check(self, batch)
        hook = _before_write.get()
        if hook is not None:
            await hook(batch.manifest)

    monkeypatch.setattr(Assembler, "check", check_and_wait)
    for module, acts in _ACTS.items():
        for function, act in acts.items():
            monkeypatch.setattr(module, function, _after_hook(getattr(module, function), act))


def _after_hook(function: Callable[..., Awaitable[Any]], act: str) -> Callable[..., Any]:
    async def call(*args: Any, **options: Any) -> Any:
        hook = _before_act.get()
        if hook is not None:
            await hook(act)
        return await function(*args, **options)

    return call


class PythonProcess(subprocess.Popen[str]):
    """A Python process that talks in lines."""

    def __init__(self, code: str, *arguments: str) -> None:
        pipe = subprocess.PIPE
        super().__init__(
            [sys.executable, "-c", code, *arguments], stdin=pipe, stdout=pipe, text=True
        )

    async def line(self) -> str:
        """Return the next line that it prints."""
        assert self.stdout is not None
        return (await asyncio.to_thread(self.stdout.readline)).strip()

    def tell(self, line: str) -> None:
        """Write a line that it reads."""
        assert self.stdin is not None
        self.stdin.write(f"{line}\n")
        self.stdin.flush()


@pytest.fixture
def start_process() -> Iterator[Callable[..., PythonProcess]]:
    """`start_process(code, *arguments)` starts a Python process, which is killed at the end."""
    with contextlib.ExitStack() as stack:

        def start(code: str, *arguments: str) -> PythonProcess:
            process = PythonProcess(code, *arguments)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def start_batcher_process(
    server: EmbeddedServer, start_process: Callable[..., PythonProcess]
) -> Callable[..., PythonProcess]:
    """`start_batcher_process(failpoint, **options)` starts a batcher process."""

    def start(failpoint: str = "", **options: Any) -> PythonProcess:
        options = {"leader_lease_s": 0.6, **options}
        return start_process(BATCHER, server.url, failpoint, json.dumps(options))

    return start


class Replica:
    """A batcher in this process."""

    def __init__(
        self, options: BatcherOptions, before_write: Hook | None, before_act: Hook | None
    ) -> None:
        self.address = ""
        self._options = options
        self._before_write = before_write
        self._before_act = before_act
        self._may_end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when it answers."""
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._serve(ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Stop cleanly."""
        self._may_end.set()
        if self._task is not None:
            await self._task

    async def _serve(self, ready: asyncio.Event) -> None:
        _before_write.set(self._before_write)
        _before_act.set(self._before_act)
        async with serving(self._options) as self.address:
            ready.set()
            await self._may_end.wait()


class Pulled(NamedTuple):
    """A received mini-batch."""

    header: wire.MiniBatchHeader
    mini_batch: MiniBatch
    data: bytes

    @property
    def rows(self) -> list[str]:
        """Its rows in letters, inert ones included."""
        return testkit.spell(self.mini_batch.rows)


class Trainer:
    """A trainer's calls to one batcher."""

    def __init__(self, address: str, run: str) -> None:
        self.run = run
        self.session_epoch = 0
        self.dp_world_size = 1
        self._channel = grpc.aio.insecure_channel(address)

    async def start(
        self, session: str = "s", *, token: str = "", dp_world_size: int = 1
    ) -> wire.StartReply:
        """Begin a session; later calls carry its epoch."""
        request = wire.StartRequest(
            run=self.run, recovery_token=token, dp_world_size=dp_world_size, session=session
        )
        reply = await self._call("Start", request, wire.StartReply)
        self.session_epoch = reply.session_epoch
        self.dp_world_size = dp_world_size
        return reply

    async def get(
        self, step: int, *, dp_rank: int = 0, wait_s: float = 30.0, **knows: str
    ) -> list[Pulled]:
        """All mini-batches of a step."""
        request = wire.GetRequest(
            run=self.run,
            step=step,
            dp_rank=dp_rank,
            dp_world_size=self.dp_world_size,
            session_epoch=self.session_epoch,
            wait_s=wait_s,
            **knows,
        )
        call = self._channel.unary_stream(
            "/turnstream.wire.v1.Batches/Get",
            request_serializer=wire.GetRequest.SerializeToString,
            response_deserializer=wire.GetChunk.FromString,
        )
        headers: list[wire.MiniBatchHeader] = []
        data: list[bytearray] = []
        try:
            async for chunk in call(request):
                if chunk.HasField("header"):
                    headers.append(chunk.header)
                    data.append(bytearray())
                else:
                    data[-1] += chunk.data
        except grpc.aio.AioRpcError as error:
            raise status_to_error(error.code().name, error.details() or "") from error
        return [
            Pulled(header, decode_mini_batch(raw), bytes(raw))
            for header, raw in zip(headers, data, strict=True)
        ]

    async def refused(self, step: int, *, words: str) -> NotReadyError:
        """Return the error of a wait for a step, once it has these words."""

        async def ends() -> NotReadyError | None:
            with pytest.raises(NotReadyError) as caught:
                await self.get(step, wait_s=0.1)
            return caught.value if re.search(words, str(caught.value)) else None

        error = await testkit.wait_until_async(ends, describe=f"to be told {words!r}")
        assert error is not None
        return error

    async def stepped(self, pulled: Sequence[Pulled]) -> RecoveryToken:
        """Acknowledge the step that these mini-batches are of."""
        info = pulled[-1].mini_batch.info
        request = wire.SteppedRequest(
            run=self.run,
            step=info.step,
            session_epoch=self.session_epoch,
            manifest_hash=info.manifest_hash,
        )
        reply = await self._call("Stepped", request, wire.SteppedReply)
        return RecoveryToken.parse(reply.recovery_token)

    async def committed(self, token: RecoveryToken) -> None:
        """Say that the checkpoint with this token is on disk."""
        request = wire.CommittedRequest(
            run=self.run, recovery_token=str(token), session_epoch=self.session_epoch
        )
        await self._call("Committed", request, wire.CommittedReply)

    async def train(self, *steps: int, commits: bool = True) -> list[RecoveryToken]:
        """Pull steps, acknowledge them, and commit each; return their tokens."""
        tokens: list[RecoveryToken] = []
        for step in steps:
            tokens.append(await self.stepped(await self.get(step)))
            if commits:
                await self.committed(tokens[-1])
        return tokens

    async def announce_version(self, version: int, *, step: int, weights_uri: str = "") -> None:
        """Say that new weights exist."""
        request = wire.AnnounceVersionRequest(
            run=self.run,
            version=version,
            step=step,
            session_epoch=self.session_epoch,
            weights_uri=weights_uri,
        )
        await self._call("AnnounceVersion", request, wire.AnnounceVersionReply)

    async def move_to(self, replica: Replica) -> None:
        """Call another replica from now on."""
        await self._channel.close()
        self._channel = grpc.aio.insecure_channel(replica.address)

    async def close(self) -> None:
        """Disconnect."""
        await self._channel.close()

    async def _call(self, method: str, request: Any, reply: Any) -> Any:
        call = self._channel.unary_unary(
            f"/turnstream.wire.v1.Batches/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        try:
            return await call(request)
        except grpc.aio.AioRpcError as error:
            raise status_to_error(error.code().name, error.details() or "") from error


class House:
    """A store, and whatever a test starts around it; all of it ends with the test."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = connect(url)
        self._replicas: list[Replica] = []
        self._trainers: list[Trainer] = []

    def create_run(self, *, batch_groups: int = 2, **fields: Any) -> str:
        """A new run; `fields` replace those of its config."""
        name = f"run {next(_numbers)}"
        defaults = {"max_staleness": 1000, "max_planned_ahead": 1, **fields}
        config: BatchingConfig = dataclasses.replace(testkit.config(batch_groups), **defaults)
        create_run(self.client, name, config)
        return name

    def delete_run(self, run: str) -> None:
        """Remove a run from the store, and wake its waiting callers."""
        names = keys.run_keys(run)
        self.client.delete(*names)
        self.client.xadd(names.wake, {"w": ""})

    def end_leases(self, run: str, *trajectory_ids: str, ago_s: float = 3600) -> None:
        """Let leases have ended so long ago: those of these trajectories, or all of the run."""
        leases = keys.run_keys(run).leases
        seconds, _ = cast("tuple[int, int]", self.client.time())
        ends: Any = trajectory_ids or self.client.zrange(leases, 0, -1)
        self.client.zadd(leases, dict.fromkeys(ends, (seconds - ago_s) * 1000), xx=True)

    def pass_deadlines(self, run: str) -> None:
        """Let every deadline that the run has been set be over."""
        deadlines = keys.run_keys(run).deadlines
        found: Any = self.client.zrange(deadlines, 0, -1)
        self.client.zadd(deadlines, dict.fromkeys(found, 0), xx=True)

    async def publish(self, run: str, *groups: Group, closes: bool = False) -> None:
        """Send whole groups, in order, and close the run if told so."""

        def send() -> None:
            with Publisher(self.url, run) as publisher:
                for group in groups:
                    publisher.publish(group).result(30)
                if closes:
                    publisher.close_run()

        await asyncio.to_thread(send)

    def seal_group_of_one(
        self,
        run: str,
        group_id: str,
        stored: StoredTurn,
        *,
        said: TurnShape | None = None,
        posts: bool = True,
    ) -> None:
        """Seal a group of one, past all checks of a publisher.

        `said` is the shape in the seal, the true one by default. `posts` says whether its writer
        lived to notify the run of the seal.
        """
        key = TrajectoryKey(group_id, sample=0)
        record = encode_turn(stored)
        crc = int.from_bytes(record[-4:], "little")
        seal = encode_event(
            testkit.sealed(group_id, turns=[said or stored.shape], payload_crcs=[crc])
        )
        self.open_group(run, group_id, keys.trajectory_id(key))
        self.seal(run, keys.trajectory_id(key), record, seal=seal, posts=posts)

    def open_group(
        self,
        run: str,
        group_id: str,
        *trajectory_ids: str,
        num_samples: int = 1,
        purpose: Purpose = Purpose.TRAIN,
    ) -> None:
        """Open trajectories of a group for the writer "w", which sends no heartbeat."""
        opened = GroupOpened(
            group_id=group_id, prompt_uid="", num_samples=num_samples, purpose=purpose
        )
        words = (keys.encode_name(group_id), group_size(opened), "w", encode_event(opened))
        command = script("open_group")(keys.run_keys(run).of_open_group, *words, *trajectory_ids)
        run_command(self.client, command)

    def seal(
        self, run: str, trajectory_id: str, *turns: bytes, seal: bytes, lease: Any = 1, posts: bool
    ) -> None:
        """Store the turns and the seal of an open trajectory as they are, and post the seal."""
        place = keys.trajectory_keys(run, trajectory_id)
        post = script("post_sealed")(keys.run_keys(run).of_post_sealed, trajectory_id, lease, seal)
        run_command(self.client, script("append")(place, "1:w", 0, 1, *turns, seal))
        if posts:
            run_command(self.client, post)

    def change_records(self, stream: str, change: Callable[[list[bytes]], list[bytes]]) -> None:
        """Write a stream again with other records, under the same ids where they are as many."""
        entries: Any = self.client.xrange(stream)
        self.client.delete(stream)
        changed = change([fields[b"r"] for _, fields in entries])
        for number, record in enumerate(changed):
            entry_id, fields = entries[number]
            self.client.xadd(stream, {**fields, b"r": record}, id=entry_id)

    def damage(self, run: str, trajectory_id: str, *, record: int = 0) -> bytes:
        """Flip a bit of a turn, or of the seal (-1); return the damaged record."""
        damaged = bytearray()

        def flip(records: list[bytes]) -> list[bytes]:
            damaged[:] = records[record]
            damaged[-9] ^= 1
            records[record] = bytes(damaged)
            return records

        self.change_records(keys.trajectory_keys(run, trajectory_id).turns, flip)
        return bytes(damaged)

    async def start_batcher(
        self,
        *,
        before_write: Hook | None = None,
        before_act: Hook | None = None,
        lease_s: float = 5.0,
        park_after_s: float = PARK_AFTER_S,
        wait_max_s: float = 60.0,
        upkeep: Upkeep = DEFAULT_UPKEEP,
    ) -> Replica:
        """Start a replica.

        `before_write` is awaited with each checked plan before it is written, and `before_act` with
        the name of each act of upkeep before it is done.
        """
        options = BatcherOptions(
            redis_url=self.url,
            leader_lease_s=lease_s,
            park_after_s=park_after_s,
            get_wait_max_s=wait_max_s,
            upkeep=upkeep,
            shutdown_grace_s=0.5,
        )
        replica = Replica(options, before_write, before_act)
        await replica.start()
        self._replicas.append(replica)
        return replica

    def trainer(self, replica: Replica | str, run: str) -> Trainer:
        """A trainer that calls the server at an address."""
        address = replica if isinstance(replica, str) else replica.address
        trainer = Trainer(address, run)
        self._trainers.append(trainer)
        return trainer

    async def serve(self, **fields: Any) -> tuple[str, Trainer]:
        """A new run, and a trainer of it at a new batcher."""
        run = self.create_run(**fields)
        return run, self.trainer(await self.start_batcher(), run)

    async def start_trainer(self, run: str, *, session: str = "s", **options: Any) -> Trainer:
        """Start a batcher, and a session of a trainer of this run at it."""
        trainer = self.trainer(await self.start_batcher(**options), run)
        await trainer.start(session)
        return trainer

    async def started(
        self,
        *groups: Group,
        session: str = "s",
        dp_world_size: int = 1,
        closes: bool = False,
        **fields: Any,
    ) -> tuple[str, Trainer]:
        """Publish groups of a new run, and start a session of its trainer at a new batcher."""
        run, trainer = await self.serve(**fields)
        await self.publish(run, *groups, closes=closes)
        await trainer.start(session, dp_world_size=dp_world_size)
        return run, trainer

    def frontier(self, run: str) -> Frontier:
        """The frontier of a run."""
        return read_frontier(self.client, run)

    def ledger(self, run: str) -> LedgerCounts:
        """The counts of the ledger, which must add up."""
        ledger = read_ledger(self.client, run)
        ledger.check()
        return ledger

    def states(self, run: str) -> dict[TrajectoryState, int]:
        """The number of trajectories by state, where it is not 0."""
        return {state: number for state, number in self.ledger(run).by_state.items() if number}

    def dead_letters(self, run: str) -> DeadLetters:
        """The dead letters of a run."""
        return read_dead_letters(self.client, run)

    async def planned(self, run: str, step: int) -> None:
        """Return when this step is planned."""
        await testkit.wait_until_async(
            lambda: self.frontier(run).planned >= step, describe=f"the plan of step {step}"
        )

    async def close(self) -> None:
        """Stop everything."""
        for trainer in self._trainers:
            await trainer.close()
        for replica in self._replicas:
            await replica.stop()
        self.client.close()


@pytest.fixture
async def house(server: EmbeddedServer) -> AsyncIterator[House]:
    """A house around the shared store."""
    house = House(server.url)
    yield house
    await house.close()


@pytest.fixture
async def house_at() -> AsyncIterator[Callable[[str], House]]:
    """Makes a house around a store of one's own."""
    houses: list[House] = []

    def make(url: str) -> House:
        houses.append(House(url))
        return houses[-1]

    yield make
    for house in houses:
        await house.close()


@pytest.fixture
def of_3() -> Callable[[str], Group]:
    """`of_3(name)` makes a group of three with different rewards."""

    def build(group_id: str) -> Group:
        turn = testkit.turn("ab", "CD")
        members = [testkit.trajectory(turn, sample=s, reward=float(s)) for s in range(3)]
        return testkit.group(group_id, *members)

    return build
