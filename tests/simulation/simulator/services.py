"""Batchers and trainers: the real planner with all that stands beside it, and the real sessions."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from simulator.clients import AsyncClient
from simulator.life import URL, Life, patiently
from simulator.processes import Process
from turnstream.batching.plan import Manifest
from turnstream.errors import (
    ConflictError,
    EndOfRunError,
    FencedError,
    NotReadyError,
    ReleasedError,
    StoreBehindError,
    UnavailableError,
)
from turnstream.store import keys
from turnstream.types import RecoveryToken, VersionAnnounced
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.assembler import Assembler
from turnstream_server.batcher.planner import RunPlanner
from turnstream_server.batcher.renewal import RENEWALS_PER_LEASE, LeadershipKeeper
from turnstream_server.batcher.runs import RunView
from turnstream_server.batcher.servicer import _check_caller, _check_chain
from turnstream_server.batcher.shares import PlannedBatch
from turnstream_server.bus.frontier import read_frontier_async
from turnstream_server.bus.sessions import (
    TrainerSession,
    acknowledge_committed,
    acknowledge_stepped,
    start_session,
)
from turnstream_server.bus.versions import announce_version

_MOST_WAITS = 40
"""In a row, after a power cut. Where the store lost the acknowledgement of a step and still has its
plan, nothing tells the session; somebody looks at a run that stands still, and starts it again."""

_FROM_THE_START = RecoveryToken(lineage="main", step=0, chain_hash="")

# batchers


async def batcher(process: Process, life: Life) -> None:
    """A replica: it follows the run, and leads it while it can."""
    client = AsyncClient(process)
    frontier = await patiently(lambda: read_frontier_async(client, life.run))
    view = RunView(client, life.run, frontier=frontier, on_stepped=_ignore)
    keeper = LeadershipKeeper(URL, owner=process.name, lease_s=life.leader_lease_s)
    keeper._thread = threading.Thread()  # never started: `_renew` below is what it would do

    async def note(manifest: Manifest) -> None:
        life.history.intended.setdefault(manifest.step, []).append(manifest)

    planner = RunPlanner(
        client,
        view,
        Assembler(URL, max_cache_bytes=1 << 16),
        keeper=keeper,
        upkeep=life.upkeep,
        before_write=note,
    )
    await asyncio.gather(planner.run(), _renew(keeper))


async def _renew(keeper: LeadershipKeeper) -> None:
    """What the keeper's thread does."""
    while True:
        await asyncio.sleep(keeper.lease_s / RENEWALS_PER_LEASE)
        keeper._renew(keeper._living_terms())


def _ignore(_: object) -> None:
    """Nobody else wants to know."""


# trainers


async def trainer(process: Process, life: Life) -> None:
    """One start of a trainer: from a checkpoint to the end of the run, or until it is replaced."""
    world, history = process.world, life.history
    history.num_sessions += 1
    client = AsyncClient(process)
    name = f"{process.name}-{history.num_sessions}"
    begun = await _begin(client, life, name, process)
    if begun is None:
        return
    session, dp_world_size = begun
    history.trained = {
        step: own_hash
        for step, own_hash in history.planned.items()
        if step < session.next_step and (step, own_hash) in history.all_trained
    }
    frontier = await patiently(lambda: read_frontier_async(client, life.run))
    view = RunView(client, life.run, frontier=frontier, on_stepped=_ignore)
    asked = wire.GetRequest(
        step=session.next_step,
        session=name,
        session_epoch=session.session_epoch,
        dp_world_size=dp_world_size,
    )
    num_waits = 0
    try:
        while True:
            try:
                batch = await _get(view, asked)
            except (NotReadyError, UnavailableError):
                num_waits += 1
                if "cut" in world.counts and num_waits > _MOST_WAITS:
                    return
                await asyncio.sleep(0.1 + 0.4 * world.rng.random())
                continue
            await _train(process, life, client, (name, session), batch)
            num_waits = 0
            asked.step += 1
            asked.previous_hash = batch.manifest_hash
    except EndOfRunError:
        life.is_ended = True
    except FencedError as error:
        history.refused(error)
    except (StoreBehindError, ConflictError) as error:
        if "cut" not in world.counts:
            raise
        history.refused(error)


async def _get(view: RunView, asked: wire.GetRequest) -> PlannedBatch:
    """What the servicer does before it sends a batch."""
    batch = await view.wait_for_batch(
        asked.step, check=lambda frontier: _check_caller(asked, frontier), wait_s=0.3
    )
    _check_chain(asked, batch)
    return batch


async def _begin(
    client: AsyncClient, life: Life, name: str, process: Process
) -> tuple[TrainerSession, int] | None:
    """Begin a session after the newest checkpoint, or sometimes after one before it."""
    history, rng = life.history, process.world.rng
    tokens: list[RecoveryToken | None] = [None, *history.checkpoints]
    token = tokens[-1]
    if rng.random() < 0.2:
        token = rng.choice(tokens[-life.config.retain_checkpoints - 1 :])
    dp_world_size = rng.choice((2, 3, 4))
    # Of what is on disk, the newest that the store takes: a session that sleeps may have begun
    # after one that was given up here.
    others = [tokens[-1], *reversed(history.on_disk), None, _FROM_THE_START]
    while True:
        try:
            session = await start_session(
                client, life.run, session=name, dp_world_size=dp_world_size, token=token
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
            if not _is_present(process, life, name):
                return None
            history.begun(name, session, token)
            return session, dp_world_size


def _is_present(process: Process, life: Life, name: str) -> bool:
    """Whether the store names this session: it may have slept while another began after it."""
    frontier: Any = process.world.store.values[keys.run_keys(life.run).frontier.encode()]
    return frontier[b"session"] == name.encode()


def _require_present(life: Life, name: str) -> None:
    """A session that sleeps finds out when it wakes up, or soon after."""
    if life.history.session != name:
        raise FencedError(f"session {name} sleeps while another begins")


async def _train(
    process: Process,
    life: Life,
    client: AsyncClient,
    who: tuple[str, TrainerSession],
    batch: PlannedBatch,
) -> None:
    world, history = process.world, life.history
    manifest, (name, session) = batch.manifest, who
    _require_present(life, name)
    if history.planned.get(manifest.step) == batch.manifest_hash:  # else the store lost both
        _payload_is_there(process, life, manifest)
    before = history.ever_trained.setdefault(manifest.step, batch.manifest_hash)
    history.all_trained.add((manifest.step, batch.manifest_hash))
    if "cut" in world.counts:  # the step may have been lost while the batch was on its way
        before = history.ever_trained[manifest.step] = batch.manifest_hash
    if before != batch.manifest_hash:
        world.blame(f"step {manifest.step} was {before}, and comes as {batch.manifest_hash}")
    await asyncio.sleep(world.rng.random() * 0.3)
    token = await patiently(
        lambda: acknowledge_stepped(
            client,
            life.run,
            session_epoch=session.session_epoch,
            step=manifest.step,
            manifest_hash=batch.manifest_hash,
            session=name,
        )
    )
    _require_present(life, name)
    history.trained[manifest.step] = batch.manifest_hash
    await _announce(life, client, session, manifest.step)
    _require_present(life, name)
    if world.rng.random() < 0.6 or life.is_closing:
        history.saved(token, retained=life.config.retain_checkpoints)  # whoever is told of it
        await patiently(
            lambda: acknowledge_committed(
                client, life.run, session_epoch=session.session_epoch, token=token, session=name
            )
        )


async def _announce(life: Life, client: AsyncClient, session: TrainerSession, step: int) -> None:
    life.history.newest_version += 1
    announced = VersionAnnounced(
        version=life.history.newest_version, step=step, lineage=session.lineage
    )
    await patiently(
        lambda: announce_version(client, life.run, announced, session_epoch=session.session_epoch)
    )


def _payload_is_there(process: Process, life: Life, manifest: Manifest) -> None:
    """What a session may train is there: nothing was released too soon."""
    store = process.world.store
    for group in manifest.groups:
        for member in group.trajectories:
            name = keys.trajectory_id(member.key)
            stream: Any = store.values.get(keys.trajectory_keys(life.run, name).turns.encode())
            if stream is None or len(stream) != len(member.payload_crcs) + 1:
                process.world.blame(f"step {manifest.step} has no payload of {name} any more")
