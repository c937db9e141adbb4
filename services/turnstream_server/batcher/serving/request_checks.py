"""Checks of requests for a batch, and records of the batches that callers have."""

from __future__ import annotations

import redis.asyncio

from turnstream.errors import ConflictError, FencedError, StoreBehindError
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.bus.core.frontier import Frontier
from turnstream_server.bus.sessions.sessions import record_rank


async def admit(
    client: redis.asyncio.Redis, view: RunView, request: wire.GetRequest, *, wait_s: float
) -> PlannedBatch:
    """Return the requested batch once it is planned, and record what the rank has and gets.

    A step is acknowledged only if all ranks are recorded to have it from the same manifest.
    """
    await record_caller(client, request)
    try:
        batch = await view.wait_for_batch(
            request.step, check=lambda frontier: check_caller(request, frontier), wait_s=wait_s
        )
        _check_chain(request, batch)
    except StoreBehindError:
        await record_caller(client, request)  # the other ranks get the error, too
        raise
    if request.dp_world_size > 1:  # recorded before the first byte
        await _record(client, request, request.step, batch.manifest_hash, has=False)
    return batch


async def record_caller(client: redis.asyncio.Redis, request: wire.GetRequest) -> None:
    """Record the newest batch that was delivered to a rank of the trainer, at least in part.

    Raises:
        StoreBehindError: the store lacks the batch, or another rank has another one: the session is
            lost.
        FencedError: the session has ended.
    """
    if request.manifest_hash:
        await _record(client, request, request.step, request.manifest_hash, has=True)
    elif request.previous_hash:
        await _record(client, request, request.step - 1, request.previous_hash, has=True)


async def _record(
    client: redis.asyncio.Redis,
    request: wire.GetRequest,
    step: int,
    manifest_hash: str,
    *,
    has: bool,
) -> None:
    if request.observer:
        return
    await record_rank(
        client,
        request.run,
        session_epoch=request.session_epoch,
        dp_rank=request.dp_rank,
        step=step,
        manifest_hash=manifest_hash,
        has=has,
        session=request.session,
    )


def check_caller(request: wire.GetRequest, frontier: Frontier) -> None:
    """Refuse a rank that is neither of the current session nor of an observer.

    Raises:
        FencedError: its session has ended.
        StoreBehindError: this store has not planned the batch that it has.
        ConflictError: the session has another number of ranks.
    """
    is_of_older_session = request.session_epoch < frontier.session_epoch
    if not request.observer and is_of_older_session and not frontier.has_session:
        raise FencedError(
            f"trainer session {request.session_epoch} has ended: payload was damaged and plans "
            "were withdrawn; start another session with the token of the last checkpoint"
        )
    if request.previous_hash and frontier.planned < request.step - 1:
        raise StoreBehindError(
            f"step {request.step - 1} was delivered from the manifest {request.previous_hash!r}, "
            f"but the newest batch of this store is {frontier.planned}"
        )
    if request.observer:
        return
    if request.session_epoch != frontier.session_epoch or not frontier.session_epoch:
        raise FencedError(
            f"trainer session {request.session_epoch} has ended, "
            f"the current one is {frontier.session_epoch}"
        )
    if request.session and request.session != frontier.session:
        raise FencedError(
            f"trainer session {request.session!r} has ended or was lost, "
            f"{frontier.session!r} has its epoch {frontier.session_epoch}"
        )
    if frontier.lost_session:
        raise StoreBehindError(frontier.lost_session)
    if request.dp_world_size != frontier.dp_world_size:
        raise ConflictError(
            f"the session has {frontier.dp_world_size} ranks, not {request.dp_world_size}"
        )


def _check_chain(request: wire.GetRequest, batch: PlannedBatch) -> None:
    """Refuse a caller that has another batch, or a part of one, at this place of the chain.

    The store may have lost that batch, or have withdrawn it and planned its number again.
    """
    own = batch.manifest_hash
    if request.manifest_hash and request.manifest_hash != own:
        raise StoreBehindError(
            f"a part of step {request.step} was delivered from the manifest "
            f"{request.manifest_hash!r}, this store has {own!r} as step {request.step}"
        )
    before = batch.manifest.previous_hash
    if request.previous_hash and request.previous_hash != before:
        raise StoreBehindError(
            f"step {request.step - 1} was delivered from the manifest {request.previous_hash!r}, "
            f"this store has {before!r} as step {request.step - 1}"
        )
