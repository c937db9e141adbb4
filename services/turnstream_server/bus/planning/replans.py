"""Withdrawal of plans whose payload was damaged: request, execution, answer.

A request is stored in the run. The leader answers it in `replanned` or in `refused_replan`.
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

from turnstream.batching.merge.plan import Manifest
from turnstream.errors import ConflictError, NotReadyError
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Script, run_command, run_command_async
from turnstream.types import PlansWithdrawn, TrajectoryDied, TrajectoryKey
from turnstream_server.bus.core.frontier import ReplanRequest
from turnstream_server.bus.leadership.leadership import LeaderScript, Term

MAX_NAMED: Final = 16
"""Dead trajectories that an answer names; the dead letters have all."""

_WAKE_S: Final = 1.0
"""Longest read that waits for an answer, for the case that its wake was missed."""

_REQUEST = Script("request_replan", "turnstream_server.bus.planning")
_REFUSE = LeaderScript("refuse_replan", "planning", "frontier wake")
_WITHDRAW = LeaderScript(
    "withdraw_plans",
    "planning",
    "frontier batches plan ledger counts groups snapshot events letters wake held budget config "
    "observers times",
)
_NOTE_DAMAGE = Script("note_damage", "turnstream_server.bus.planning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """Withdrawn steps, and the dead trajectories in them, of which MAX_NAMED are named."""

    first_step: int
    newest_step: int
    num_dead: int
    dead: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """The arguments of `withdraw_plans`.

    Attributes:
        manifests: the plans, from the damaged step to the newest.
        dead: the damaged trajectories in them.
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

    None stands for the first damaged step. The leader checks the step when it answers.
    """
    names = keys.run_keys(run)
    command = _REQUEST((names.frontier, names.wake), uuid.uuid4().hex, step or 0)
    name: bytes = run_command(client, command)
    return name.decode()


def await_replan(client: redis.Redis, run: str, request: str, *, wait_s: float) -> Replanned:
    """Wait for the answer to a request.

    Raises:
        ConflictError: the leader refuses the request.
        NotReadyError: no leader has answered; the request stays.
    """
    names = keys.run_keys(run)
    end_s = time.monotonic() + wait_s
    last = "0-0"
    while True:
        with translating():
            answers: Any = client.hmget(names.frontier, "replanned", "refused_replan")
        done, refused = [(each or b"").decode() for each in answers]
        if done.startswith(f"{request}:"):
            return _parse(done.partition(":")[2])
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


async def refuse_replan(term: Term, request: ReplanRequest, why: str) -> None:
    """Answer a request that is not executed."""
    await _REFUSE.run(term, request.name, why)


async def withdraw_plans(term: Term, request: ReplanRequest, withdrawal: Withdrawal) -> bool:
    """Withdraw plans, all or none: damaged trajectories are dead, the others sealed again.

    The trainer session ends. The planner continues from the snapshot.

    Returns:
        False if it was done before.

    Raises:
        ConflictError: there is no such request, a step is stepped, or there are other plans.
    """
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
    is_new = await _WITHDRAW.run(
        term,
        request.name,
        *(first.step, withdrawal.manifest_hashes[0]),
        *(newest.step, withdrawal.manifest_hashes[-1]),
        *(withdrawal.position, withdrawal.snapshot, encode_event(event), json.dumps(told)),
        *(len(dead_ids), len(groups)),
        *(*dead, *groups, *left),
    )
    return bool(is_new)


async def note_damage(
    client: redis.asyncio.Redis, run: str, *, step: int, manifest_hash: str, sentence: str
) -> None:
    """Record damaged payload that a rank was refused."""
    names = keys.run_keys(run)
    command = _NOTE_DAMAGE((names.frontier, names.batches), step, manifest_hash, sentence)
    await run_command_async(client, command)


async def _payload_bytes(client: redis.asyncio.Redis, run: str, ids: Sequence[str]) -> list[int]:
    pipeline = client.pipeline(transaction=False)
    for name in ids:
        pipeline.execute_command("HGET", keys.trajectory_keys(run, name).meta, "bytes")
    with translating():
        return [int(num_bytes or 0) for num_bytes in await pipeline.execute()]


def _parse(answer: str) -> Replanned:
    content: dict[str, Any] = json.loads(answer)
    content["dead"] = tuple(content["dead"])
    return Replanned(**content)
