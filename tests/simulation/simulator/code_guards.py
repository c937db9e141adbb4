"""Guards of the fold, its leader, and publishers that resend."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

from simulator import ranks
from simulator.breaks import Guard, method
from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.planning.selection import Selector
from turnstream.generator.outbox import trajectories
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.resend_buffer import ResendBuffer
from turnstream_server.batcher.planner import planner, releaser, settling
from turnstream_server.batcher.planner.leader import Leader
from turnstream_server.batcher.planner.renewal import LeadershipKeeper
from turnstream_server.batcher.planner.timekeeper import ClockReading, SteadyClock
from turnstream_server.bus.core.server_instance import PinnedClient


async def _nothing(*_: Any, **__: Any) -> set[str]:
    return set()


async def _all_of(_: Any, __: str, names: list[str]) -> set[str]:
    return set(names)


async def _wait_for_ever(*_: Any) -> None:
    await asyncio.Event().wait()


async def _meet_any(_: PinnedClient, connection: Any) -> None:
    await connection.on_connect()


def _never_heard(self: RunFold, event_id: str, event: Any) -> list[Any]:
    group = self._groups.get(event.key.group_id)
    return self._late(event.key) if group is None else self._place(event_id, group, event)


def _always_steady(_: SteadyClock, *, server_ms: int, now_s: float) -> ClockReading:
    return ClockReading(server_ms, now_s, now_s)


CODE_GUARDS = (
    Guard("fold: a seal is heard once", method(RunFold, "_seal", _never_heard)),
    Guard("fold: a decision that no longer holds", method(RunFold, "still_holds", lambda *_: True)),
    Guard("fold: one member per sample", method(RunFold, "_why_surplus", lambda *_: "")),
    Guard("selector: what was chosen is planned", method(Selector, "pass_step", lambda *_: None)),
    Guard("leader: plans take their groups in the replay", method(Leader, "_pass", lambda *_: [])),
    Guard(
        "leader: a group that is gone was settled",
        lambda: patch.object(settling, "groups_that_are_gone", _nothing),
    ),
    Guard(
        "releaser: a group that may get members",
        lambda: patch.object(releaser, "groups_that_are_over", _all_of),
    ),
    # leaderships and the starts of the store
    Guard(
        "planner: what belongs to one start of the store",
        method(PinnedClient, "_meet", _meet_any),
        "may_lose",
    ),
    Guard(
        "planner: seals that nobody posted",
        lambda: patch.object(planner, "post_forgotten_seals", _nothing),
    ),
    Guard("planner: a lost leadership ends", method(LeadershipKeeper, "hold", _wait_for_ever)),
    Guard(
        "keeper: a loop that stands still",
        method(LeadershipKeeper, "_living_terms", lambda s: [*s._terms]),
    ),
    Guard("timekeeper: a clock that jumped", method(SteadyClock, "read", _always_steady)),
    # trainers
    Guard(
        "get: the epoch and the name of the session",
        lambda: patch.object(ranks, "check_caller", lambda *_: None),
    ),
    Guard(
        "get: the batch before",
        lambda: patch.object(ranks, "check_chain", lambda *_: None),
    ),
    Guard("get: a rank says what it has", lambda: patch.object(ranks, "record_caller", _nothing)),
    # publishers
    Guard("window: what may be lost is kept", method(ResendBuffer, "keep", lambda *_, **__: None)),
    Guard("outbox: what was lost is sent again", method(Outbox, "_meet", lambda *_, **__: None)),
    Guard(
        "outbox: what was not answered is sent again", method(Outbox, "_put_back", lambda *_: None)
    ),
    Guard(
        "outbox: what survived a restart",
        lambda: patch.object(trajectories, "has_survived", lambda *_: False),
    ),
    Guard(
        "outbox: what its payload knows",
        lambda: patch.object(trajectories, "is_left_to_payload", lambda *_: False),
    ),
)
