"""Withdrawal of plans whose payload was damaged: request, execution, answer.

A request is stored in the run, and the leader answers it::

    request_replan ──> replan ──> leader ──> withdraw_plans ──> replanned: which steps, who is dead
                                        └──> refuse_replan ──> refused_replan: why
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis
import redis.asyncio
from redis.exceptions import RedisError

from turnstream.batching.merge.plan import Manifest
from turnstream.errors import ConflictError, NotReadyError
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translate, translating
from turnstream.store.client.scripts import Script, run_command, run_command_async
from turnstream.types import PlansWithdrawn, TrajectoryDied, TrajectoryKey
from turnstream_server.bus.core.frontier import ReplanRequest
from turnstream_server.bus.leadership.leadership import Term

MAX_NAMED: Final = 16
"""Dead trajectories that are named in the run; the dead letters have them all."""

_WAKE_S: Final = 1.0
"""Longest read that waits for an answer: where its wake was missed, it is found all the same."""

_REQUEST = Script("request_replan", "turnstream_server.bus.planning")
_REFUSE = Script("refuse_replan", "turnstream_server.bus.planning")
_WITHDRAW = Script("withdraw_plans", "turnstream_server.bus.planning")
_NOTE_DAMAGE = Script("note_damage", "turnstream_server.bus.planning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """Plans that were withdrawn.

    Attributes:
        first_step, newest_step: which steps are planned again.
        num_dead: trajectories whose payload was damaged.
        dead: their names, MAX_NAMED of them at most.
        since_ms: when, by the server's clock.
    """

    first_step: int
    newest_step: int
    num_dead: int
    dead: tuple[str, ...]
    since_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """The arguments of `withdraw_plans`.

    Attributes:
        manifests: the plans, from the damaged step to the newest.
        manifest_hashes: their hashes.
        dead: the damaged trajectories in them, each with its reason.
        lease_epochs: the lease epochs of all others at their seal.
        position: the last event in `snapshot`.
        snapshot: record of the planner's state after the step before.
    """

    manifests: Sequence[Manifest]
    manifest_hashes: Sequence[str]
    dead: Sequence[TrajectoryDied]
    lease_epochs: dict[TrajectoryKey, int]
    position: str
    snapshot: bytes


def request_replan(client: redis.Redis, run: str, *, step: int | None = None) -> str:
    """Request a replan from a damaged step on, or join the pending request; return its name.

    The leader checks the step when it answers.

    Args:
        client: client of the store.
        run: name of the run.
        step: the damaged one; None for the first that is planned, not stepped, and damaged.
    """
    names = keys.run_keys(run)
    command = _REQUEST((names.frontier, names.wake), uuid.uuid4().hex, step or 0)
    name: bytes = run_command(client, command)
    return name.decode()


def await_replan(client: redis.Redis, run: str, request: str, *, wait_s: float) -> Replanned:
    """Wait for the answer to a request.

    Raises:
        ConflictError: the leader refuses it, and says why.
        NotReadyError: no leader has answered; the request stands.
    """
    names = keys.run_keys(run)
    end_s = time.monotonic() + wait_s
    last = "0-0"
    while True:
        with translating():
            answers: Any = client.hmget(names.frontier, "replanned", "refused_replan")
        done, refused = [(each or b"").decode() for each in answers]
        if done.startswith(f"{request}:"):
            return _parse(done)
        if refused.startswith(f"{request}:"):
            raise ConflictError(refused.partition(":")[2])
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise NotReadyError(
                f"no batcher has answered within {wait_s:g} s; the request is kept, and the next "
                f"batcher that plans run {run!r} carries it out"
            )
        with translating():
            news: Any = client.xread(
                {names.wake: last}, block=max(1, round(min(left_s, _WAKE_S) * 1000))
            )
        if news:
            last = news[0][1][-1][0].decode()


def last_replanned(client: redis.Redis, run: str) -> Replanned | None:
    """The last plans of a run that were withdrawn; None before the first."""
    with translating():
        done: Any = client.hget(keys.run_keys(run).frontier, "replanned")
    return None if done is None else _parse(done.decode())


async def refuse_replan(term: Term, request: ReplanRequest, why: str) -> None:
    """Say why a request comes to nothing."""
    names = keys.run_keys(term.run)
    where = (names.leader, names.frontier, names.wake)
    await run_command_async(term.client, _REFUSE(where, term.epoch, request.name, why))


async def withdraw_plans(term: Term, request: ReplanRequest, withdrawal: Withdrawal) -> bool:
    """Withdraw plans, all or none: damaged trajectories are dead, the others sealed again.

    It ends the trainer session. The planner continues from the snapshot.

    Returns:
        False if it was done before.

    Raises:
        ConflictError: there is no such request, a step is stepped, or there are other plans:
            nothing was written.
    """
    names = keys.run_keys(term.run)
    first, newest = withdrawal.manifests[0], withdrawal.manifests[-1]
    dead_ids = [keys.trajectory_id(died.key) for died in withdrawal.dead]
    sizes = await _payload_bytes(term.client, term.run, dead_ids)
    event = PlansWithdrawn(step=first.step, dead=tuple(died.key for died in withdrawal.dead))
    told = {
        "first_step": first.step,
        "newest_step": newest.step,
        "num_dead": len(dead_ids),
        "dead": dead_ids[:MAX_NAMED],
    }
    dead: list[Any] = []
    for name, died, num_bytes in zip(dead_ids, withdrawal.dead, sizes, strict=True):
        dead += (name, died.reason, num_bytes, encode_event(died))
    groups = [keys.encode_name(g.group_id) for plan in withdrawal.manifests for g in plan.groups]
    left: list[Any] = []
    for key, epoch in withdrawal.lease_epochs.items():
        left += (keys.trajectory_id(key), epoch)
    command = _WITHDRAW(
        (
            *(names.leader, names.frontier, names.batches, names.plan, names.ledger),
            *(names.counts, names.groups, names.snapshot, names.events, names.letters),
            *(names.wake, names.held, names.budget, names.config, names.observers),
            names.times,
        ),
        *(term.epoch, request.name),
        *(first.step, withdrawal.manifest_hashes[0]),
        *(newest.step, withdrawal.manifest_hashes[-1]),
        *(withdrawal.position, withdrawal.snapshot, encode_event(event), json.dumps(told)),
        *(len(dead_ids), len(groups)),
        *(*dead, *groups, *left),
    )
    return bool(await run_command_async(term.client, command))


async def note_damage(
    client: redis.asyncio.Redis, run: str, *, step: int, manifest_hash: str, sentence: str
) -> None:
    """Record the damage that a rank met."""
    names = keys.run_keys(run)
    command = _NOTE_DAMAGE((names.frontier, names.batches), step, manifest_hash, sentence)
    await run_command_async(client, command)


async def _payload_bytes(client: redis.asyncio.Redis, run: str, ids: Sequence[str]) -> list[int]:
    pipeline = client.pipeline(transaction=False)
    for name in ids:
        pipeline.execute_command("HGET", keys.trajectory_keys(run, name).meta, "bytes")
    try:
        return [int(num_bytes or 0) for num_bytes in await pipeline.execute()]
    except (RedisError, OSError) as error:
        raise translate(error) from error


def _parse(done: str) -> Replanned:
    _, since_ms, told = done.split(":", 2)
    content: dict[str, Any] = json.loads(told)
    content["dead"] = tuple(content["dead"])
    return Replanned(since_ms=int(since_ms), **content)
