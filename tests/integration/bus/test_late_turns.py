"""A first turn that comes when even the tombstone of its trajectory is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from testkit import turn
from testkit.releases import release_payload
from turnstream.errors import FencedError
from turnstream.generator.encode.encoder import TrajectoryDraft
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import Delivery
from turnstream.store.client import keys
from turnstream.store.client.connection import Link
from turnstream.types import GroupOpened, TrajectoryKey
from turnstream_server.bus.planning.deadlines import abandon_lapsed

pytestmark = pytest.mark.redis

KEY = TrajectoryKey("g", 0)


async def send_all(outbox: Outbox, link: Link, *, now_s: float) -> None:
    """Every round that there is at this time of the writer's clock."""
    while (sent := outbox.next_round(now_s)) is not None:
        replies = await asyncio.to_thread(link.exchange, sent.pack(), sent.num_replies)
        outbox.answered(sent, replies=replies, now_s=now_s)


async def test_late_turn_writes_nothing_and_its_writer_gets_an_error(run: Any, server: Any) -> None:
    # It was stored, in no ledger and held by nobody, so that nothing ever released it.
    limits = {"max_inflight_bytes": 1 << 20, "timeout_s": 10.0, "admission_timeout_s": 10.0}
    outbox = Outbox(run.name, "w", jitter=lambda: 0.0, keep_s=0.0, **limits)
    link = Link(server.url)
    opened = GroupOpened(group_id="g", prompt_uid="", num_samples=1)
    (lane,) = outbox.admissions.request(opened, [KEY])
    for now_s in (0.0, 1.0):  # it opens, and has its lease renewed
        await send_all(outbox, link, now_s=now_s)
    payload = keys.trajectory_keys(run.name, "g/0/0")

    await run.client.zadd(run.keys.leases, {"g/0/0": 1})  # which ended long ago
    await abandon_lapsed(run.term, until_ms=1)
    await release_payload(run.client, run.name, ["g/0/0"], given_up={"g/0/0"})
    await run.client.delete(payload.meta)  # as it expires by itself some time later
    written = Delivery()
    outbox.append(lane, TrajectoryDraft(KEY).add(turn("a", "B")), written)
    await send_all(outbox, link, now_s=10_000.0)
    link.close()

    with pytest.raises(FencedError, match="g/0/0 is abandoned: the lease of w ended"):
        written.raise_error()
    assert not await run.client.exists(payload.turns, payload.meta)
