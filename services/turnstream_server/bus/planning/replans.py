"""Withdrawal of plans whose payload was damaged: request, execution, answer.

A request is stored in the run, and so is the leader's answer.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis
import redis.asyncio

from turnstream.errors import ConflictError, NotReadyError
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.types import PlansWithdrawn, TrajectoryDied, TrajectoryKey
from turnstream_server.bus.core.run_script import RunScript
from turnstream_server.bus.leadership.leadership import LeaderScript, Term

MAX_NAMED: Final = 16
"""Dead trajectories that an answer names; the dead letters have all."""

MAX_WITHDRAWN: Final = 4_000
"""Trajectories of the plans that one call withdraws: about 30 ms of the store."""

_PAUSE_S: Final = 0.2
"""Pause between two reads of the answer."""

_REQUEST = RunScript("request_replan", "planning", "frontier wake")
_REFUSE = LeaderScript("refuse_replan", "planning", "frontier wake")
_WITHDRAW = LeaderScript(
    "withdraw_plans",
    "planning",
    "frontier batches plan ledger counts groups snapshot events letters wake held budget config "
    "observers times deadlines",
)
_NOTE_DAMAGE = RunScript("note_damage", "planning", "frontier batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """Withdrawn steps, and the dead trajectories in them, of which MAX_NAMED are named."""

    first_step: int
    newest_step: int
    num_dead: int
    dead: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """The plans to withdraw, and the state of the planner before them.

    Attributes:
        manifest_hash: hash of the newest plan.
        lease_epochs: the lease epochs of all other trajectories at their seal.
        position: the last event in `snapshot`, which is of the step before.
    """

    first_step: int
    newest_step: int
    manifest_hash: str
    dead: Sequence[TrajectoryDied]
    lease_epochs: Mapping[TrajectoryKey, int]
    position: str
    snapshot: bytes


def request_replan(client: redis.Redis, run: str) -> str:
    """Request a replan from the first damaged step on, or join the pending request.

    Returns:
        Name of the pending request.
    """
    name: bytes = _REQUEST.call(client, run, uuid.uuid4().hex)
    return name.decode()


def await_replan(client: redis.Redis, run: str, request: str, *, wait_s: float) -> Replanned:
    """Wait for the answer to a request.

    Raises:
        ConflictError: the leader refuses the request.
        NotReadyError: no leader has answered; the request stays.
    """
    end_s = time.monotonic() + wait_s
    while True:
        with translating():
            answer: Any = client.hget(keys.run_keys(run).frontier, "replanned")
        name, _, text = (answer or b"").decode().partition(":")
        if name == request:
            content: dict[str, Any] = json.loads(text)
            if "refused" in content:
                raise ConflictError(content["refused"])
            return Replanned(**{**content, "dead": tuple(content["dead"])})
        if time.monotonic() >= end_s:
            raise NotReadyError(
                f"no batcher has answered within {wait_s:g} s; the request is kept, and the next "
                f"batcher that plans run {run!r} executes it"
            )
        time.sleep(_PAUSE_S)


async def refuse_replan(term: Term, request: str, why: str) -> None:
    """Answer a request that is not executed."""
    await _REFUSE.run(term, request, json.dumps({"refused": why}))


async def withdraw_plans(term: Term, request: str, withdrawal: Withdrawal) -> bool:
    """Withdraw plans, all or none: damaged trajectories are dead, the others sealed again.

    The trainer session ends. The planner continues from the snapshot.

    Returns:
        False if it was done before.

    Raises:
        ConflictError: there is no such request, a step is stepped, or there are other plans.
    """
    first, newest = withdrawal.first_step, withdrawal.newest_step
    dead_ids = [keys.trajectory_id(died.key) for died in withdrawal.dead]
    event = PlansWithdrawn(step=first, dead=tuple(died.key for died in withdrawal.dead))
    answer = {
        "first_step": first,
        "newest_step": newest,
        "num_dead": len(dead_ids),
        "dead": dead_ids[:MAX_NAMED],
    }
    words: list[Any] = []
    for name, died in zip(dead_ids, withdrawal.dead, strict=True):
        words += (name, died.reason, encode_event(died))
    for key, epoch in withdrawal.lease_epochs.items():
        words += (keys.trajectory_id(key), epoch, b"")
    is_new = await _WITHDRAW.run(
        term,
        *(request, first, newest, withdrawal.manifest_hash),
        *(withdrawal.position, withdrawal.snapshot, encode_event(event), json.dumps(answer)),
        *words,
    )
    return bool(is_new)


async def note_damage(
    client: redis.asyncio.Redis, run: str, *, step: int, manifest_hash: str, sentence: str
) -> None:
    """Record damaged payload that a rank was refused."""
    await _NOTE_DAMAGE.call_async(client, run, step, manifest_hash, sentence)
