"""Trainers: sessions that take batches as the servicer gives them, and acknowledge them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from simulator.clients import AsyncClient
from simulator.processes import Process
from simulator.shared_state import URL, SharedState, patiently
from simulator.world import World
from turnstream.batching.merge.plan import Manifest
from turnstream.errors import (
    ConflictError,
    CorruptRecordError,
    EndOfRunError,
    FencedError,
    NotReadyError,
    ReleasedError,
    StoreBehindError,
    UnavailableError,
)
from turnstream.store.client import keys
from turnstream.types import RecoveryToken, VersionAnnounced
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.listener import RunListener
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.serving.request_checks import admit
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.planning.replans import note_damage
from turnstream_server.bus.sessions.sessions import (
    TrainerSession,
    acknowledge_committed,
    acknowledge_stepped,
    announce_version,
    start_session,
)

_LONGEST_WAIT_S = 1.0
_HANGS = 0.15
_SHORTEST_HANG_S, _LONGEST_HANG_S = 0.55, 1.2
"""How often a session hangs before it says something, and for how long: most of the time
another session starts in this time."""
_LONGEST_SAVE_S = 0.5
"""Longest time to save a checkpoint."""
_FROM_THE_START = RecoveryToken(lineage="main", step=0, chain_hash="")


class Ranks:
    """All ranks of a session; each of them acknowledges."""

    def __init__(
        self,
        client: AsyncClient,
        shared: SharedState,
        name: str,
        begun: TrainerSession,
        *,
        dp_world_size: int,
    ) -> None:
        self._client = client
        self._shared = shared
        self._assembler = Assembler(URL, max_cache_bytes=1)
        self._step = begun.next_step - 1
        self._batch: PlannedBatch | None = None
        self._asked = [
            wire.GetRequest(
                run=shared.run,
                step=begun.next_step,
                session=name,
                session_epoch=begun.session_epoch,
                dp_rank=rank,
                dp_world_size=dp_world_size,
            )
            for rank in range(dp_world_size)
        ]

    @property
    def manifests(self) -> set[str]:
        """From which the batch was delivered that was pulled last."""
        return {asked.previous_hash for asked in self._asked}

    async def pull(self, view: RunView) -> PlannedBatch:
        """The next batch of rank 0, once every rank has one; called again where it failed."""
        for asked in self._asked:
            if asked.step == self._step + 1:
                batch = await self._get(view, asked)
                asked.step, asked.previous_hash = asked.step + 1, batch.manifest_hash
                self._batch = batch if asked.dp_rank == 0 else self._batch
        assert self._batch is not None
        self._step += 1
        return self._batch

    async def stepped(self, step: int, manifest_hash: str) -> RecoveryToken:
        """Acknowledge a step on every rank, each with the manifest of its own batch."""
        *others, last = self._asked
        for asked in others:
            with contextlib.suppress(NotReadyError):  # the last rank has not called yet
                await self._acknowledge(asked, step, manifest_hash)
        return await self._acknowledge(last, step, manifest_hash)

    async def _acknowledge(
        self, asked: wire.GetRequest, step: int, manifest_hash: str
    ) -> RecoveryToken:
        return await acknowledge_stepped(
            self._client,
            asked.run,
            session_epoch=asked.session_epoch,
            step=step,
            manifest_hash=asked.previous_hash if step == self._step else manifest_hash,
            session=asked.session,
            dp_rank=asked.dp_rank,
        )

    async def committed(self, token: RecoveryToken) -> None:
        """Acknowledge a checkpoint on every rank."""
        for asked in self._asked:
            await acknowledge_committed(
                self._client,
                asked.run,
                session_epoch=asked.session_epoch,
                token=token,
                session=asked.session,
                dp_rank=asked.dp_rank,
            )

    async def _get(self, view: RunView, asked: wire.GetRequest) -> PlannedBatch:
        """Do the work of the servicer before it sends a batch."""
        batch = await admit(self._client, view, asked, wait_s=0.0)
        if self._shared.rotten:
            await self._check_payload(batch)
        return batch

    async def _check_payload(self, batch: PlannedBatch) -> None:
        """Refuse damaged payload, as a replica does that assembles it for the first time."""
        damages = await self._assembler.examine(batch)
        if damages:
            step, sentence = batch.manifest.step, f"damaged payload of {damages[0].key}"
            await note_damage(
                self._client,
                self._shared.run,
                step=step,
                manifest_hash=batch.manifest_hash,
                sentence=sentence,
            )
            raise CorruptRecordError(sentence)


@dataclass
class _Session:
    """A session of one process, and what it has acknowledged.

    It repeats acknowledgements that a store has lost, as `turnstream.worker._acknowledged` does.
    """

    world: World
    shared: SharedState
    client: AsyncClient
    name: str
    begun: TrainerSession
    ranks: Ranks
    said: list[tuple[int, str]] = field(default_factory=list)

    async def say(self, step: int, manifest_hash: str) -> RecoveryToken:
        """Acknowledge the step after those before."""
        token = await self.insist(lambda: self._say(step, manifest_hash))
        if len(self.ranks.manifests) > 1:
            self.world.blame(f"step {step} is acknowledged, of {sorted(self.ranks.manifests)}")
        self.said.append((step, manifest_hash))
        return token

    async def insist(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of a call that needs all acknowledged steps."""
        try:
            return await call()
        except ConflictError:
            if not self.said:
                raise
            await self.say_again()
        return await call()

    async def say_again(self) -> None:
        """Say the newest step again, and in order those before it that are forgotten as well."""
        forgotten: list[tuple[int, str]] = []
        for step, manifest_hash in reversed(self.said):
            try:
                await self._say(step, manifest_hash)
            except ConflictError:
                forgotten.append((step, manifest_hash))
            else:
                break
        for step, manifest_hash in reversed(forgotten):
            await self._say(step, manifest_hash)

    async def _say(self, step: int, manifest_hash: str) -> RecoveryToken:
        start, history = self.world.store.num_starts, self.shared.history
        if self.is_present:
            history.newest_said = max(history.newest_said, step)
        token = await patiently(lambda: self.ranks.stepped(step, manifest_hash))
        planned = history.planned.get(step)
        if start == self.world.store.num_starts and planned != manifest_hash:
            self.world.blame(f"step {step} is {planned}, and is acknowledged as {manifest_hash}")
        if self.is_present:
            history.trained[step] = manifest_hash
        return token

    @property
    def is_present(self) -> bool:
        """Return whether no other session has started."""
        return self.shared.history.session == self.name

    def require_present(self) -> None:
        """A session that sleeps finds out when it wakes up, or soon after."""
        if not self.is_present:
            raise FencedError(f"session {self.name} sleeps while another begins")


async def trainer(process: Process, shared: SharedState) -> None:
    """One start of a trainer: from a checkpoint to the end of the run, or until it is replaced."""
    world, history = process.world, shared.history
    history.num_sessions += 1
    client = AsyncClient(process)
    name = f"{process.name}-{history.num_sessions}"
    begun = await _begin(client, shared, name, process)
    if begun is None:
        return
    session, dp_world_size = begun
    history.trained = {
        step: own_hash
        for step, own_hash in history.planned.items()
        if step < session.next_step and (step, own_hash) in history.all_trained
    }
    ranks = Ranks(client, shared, name, session, dp_world_size=dp_world_size)
    try:
        await _train_all(process, _Session(world, shared, client, name, session, ranks))
    except EndOfRunError:
        frontier: Any = world.store.values[keys.run_keys(shared.run).frontier.encode()]
        shared.is_ended = frontier.get(b"finished") == b"1"  # unless it was opened again since
    except FencedError as error:
        history.refused(error)
    except (StoreBehindError, ConflictError) as error:
        if "cut" not in world.counts:
            raise
        history.refused(error)


async def _train_all(process: Process, session: _Session) -> None:
    client, shared = session.client, session.shared
    frontier = await patiently(lambda: read_frontier_async(client, shared.run))
    view = RunView(client, shared.run, frontier=frontier, on_stepped=lambda _: None)
    listener = RunListener(client, shared.run, after_step=frontier.planned)
    while True:
        try:
            batch = await session.ranks.pull(view)
        except NotReadyError:
            await session.say_again()  # the store may wait for a step that it has forgotten
            await _wait(listener)
        except (UnavailableError, CorruptRecordError):
            await asyncio.sleep(0.1 + 0.4 * process.world.rng.random())
        else:
            await _train(process, session, batch)


async def _wait(listener: RunListener) -> None:
    try:
        await listener.wait(with_events=False, wait_s=_LONGEST_WAIT_S)
    except UnavailableError:
        await asyncio.sleep(_LONGEST_WAIT_S / 2)


async def _begin(
    client: AsyncClient, shared: SharedState, name: str, process: Process
) -> tuple[TrainerSession, int] | None:
    history, rng = shared.history, process.world.rng
    tokens: list[RecoveryToken | None] = [None, *history.checkpoints]
    token = tokens[-1]
    if rng.random() < 0.2:
        token = rng.choice(tokens[-shared.in_force.retain_checkpoints - 1 :])
    dp_world_size = rng.choice((2, 3, 4))
    # Try the newest checkpoints on disk first: a session that sleeps may have started after one
    # that is invalid here.
    others = [tokens[-1], *reversed(history.on_disk), None, _FROM_THE_START]
    while True:
        try:
            session = await start_session(
                client, shared.run, session=name, dp_world_size=dp_world_size, token=token
            )
        except UnavailableError:
            await asyncio.sleep(0.1)
        except (ReleasedError, ConflictError, StoreBehindError) as error:
            history.refused(error)
            if not others:
                raise
            token = others.pop(0)
        except FencedError as error:
            history.refused(error)
            return None
        else:
            frontier: Any = process.world.store.values[keys.run_keys(shared.run).frontier.encode()]
            if frontier[b"session"] != name.encode():
                return None  # it slept, and another began after it
            if int(frontier[b"stepped"]) != session.next_step - 1:
                process.world.blame(f"{name} begins with step {session.next_step}: {frontier}")
            shared.is_ended = False
            history.begun(name, session, token, released=int(frontier.get(b"released", 0)))
            history.may_release(retained=shared.in_force.retain_checkpoints)
            return session, dp_world_size


async def _train(process: Process, session: _Session, batch: PlannedBatch) -> None:
    shared, world, manifest = session.shared, process.world, batch.manifest
    history = shared.history
    session.require_present()
    if history.planned.get(manifest.step) == batch.manifest_hash:  # else the store lost both
        _payload_is_there(process, shared, manifest)
    before = history.ever_trained.setdefault(manifest.step, batch.manifest_hash)
    history.all_trained.add((manifest.step, batch.manifest_hash))
    if "cut" in world.counts:  # the step may have been lost while the batch was on its way
        before = history.ever_trained[manifest.step] = batch.manifest_hash
    if before != batch.manifest_hash:
        world.blame(f"step {manifest.step} was {before}, and comes as {batch.manifest_hash}")
    await asyncio.sleep(world.rng.random() * 0.3)
    token = await session.say(manifest.step, batch.manifest_hash)
    await _hang(process)
    await _announce(session, manifest.step)
    if world.rng.random() < 0.6 or shared.is_closing:
        await asyncio.sleep(world.rng.random() * _LONGEST_SAVE_S)
        await _hang(process)
        await _commit(session, token)


async def _hang(process: Process) -> None:
    """Hang by chance until another session has started, so that the next call is too late.

    The trainer does not know this and calls; the store must refuse it.
    """
    world = process.world
    if world.rng.random() < _HANGS:
        spread_s = _LONGEST_HANG_S - _SHORTEST_HANG_S
        hangs_s = _SHORTEST_HANG_S + world.rng.random() * spread_s
        process.hangs_until_s = world.now_s + hangs_s
        await asyncio.sleep(hangs_s)


async def _commit(session: _Session, token: RecoveryToken) -> None:
    """Save a checkpoint and say so, also where it is too late: the store is to refuse it."""
    shared, history = session.shared, session.shared.history
    history.saved(token, is_present=session.is_present, retained=shared.in_force.retain_checkpoints)
    await session.insist(lambda: patiently(lambda: session.ranks.committed(token)))


async def _announce(session: _Session, step: int) -> None:
    history = session.shared.history
    history.newest_version += 1
    announced = VersionAnnounced(
        version=history.newest_version, step=step, lineage=session.begun.lineage
    )
    await patiently(
        lambda: announce_version(
            session.client,
            session.shared.run,
            announced,
            session_epoch=session.begun.session_epoch,
            session=session.name,
        )
    )


def _payload_is_there(process: Process, shared: SharedState, manifest: Manifest) -> None:
    """The payload of a delivered batch is stored."""
    store = process.world.store
    for group in manifest.groups:
        for member in group.trajectories:
            name = keys.trajectory_id(member.key)
            stream: Any = store.values.get(keys.trajectory_keys(shared.run, name).turns.encode())
            if stream is None or len(stream) != len(member.payload_crcs) + 1:
                process.world.blame(f"step {manifest.step} has no payload of {name} any more")
