"""Leases that end, and turns that come after that."""

import asyncio
from typing import Any

import pytest

from testkit import sealed, turn
from turnstream.errors import ConflictError, FencedError
from turnstream.generator.encode.encoder import TrajectoryDraft
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import PendingWrite
from turnstream.generator.transport.transport import num_replies, pack_round, parse_replies
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.connection import Link
from turnstream.store.client.scripts import run_command_async
from turnstream.store.run.groups import (
    MAX_LAPSED,
    adopt_command,
    heartbeat_command,
    list_lapsed_async,
)
from turnstream.types import GroupOpened, TrajectoryAbandoned, TrajectoryKey, TrajectoryState
from turnstream_server.ledger.planning.deadlines import abandon_lapsed, end_lapsed

REASON = "the lease of writer ended"


async def lapse(run: Any, *ids: str, since_ms: int = 1) -> None:
    """Let leases end."""
    end_ms = await run.server_ms() - since_ms
    await run.client.zadd(run.keys.leases, dict.fromkeys(ids, end_ms))


async def abandon(run: Any, *, until_ms: int | None = None) -> bool:
    return await abandon_lapsed(run.term, until_ms=until_ms or await run.server_ms())


async def test_lapsed_trajectory_is_abandoned_with_an_event_and_a_reason(run: Any) -> None:
    await run.open("a")
    await lapse(run, "a/0/0")

    await abandon(run)

    assert await run.hash_of("ledger") == {
        b"a/0/0": f"abandoned:{REASON}".encode(),
        b"a/1/0": b"open:1:writer",
    }
    assert (await run.events())[1:] == [
        TrajectoryAbandoned(key=TrajectoryKey("a", 0), reason=REASON)
    ]
    assert await run.client.zrange(run.keys.leases, 0, -1) == [b"a/1/0"]
    counts = run.ledger()
    counts.check()
    assert (counts.by_state[TrajectoryState.OPEN], counts.by_state[TrajectoryState.ABANDONED]) == (
        1,
        1,
    )


async def test_abandoning_twice_changes_nothing(run: Any) -> None:
    await run.open("a")
    await lapse(run, "a/0/0")
    await abandon(run)
    async with run.unchanged():
        assert not await abandon(run)


async def test_lease_that_ended_after_the_read_time_is_kept(run: Any) -> None:
    # The clock jumped forward after the planner had read it.
    await run.open("a")
    await lapse(run, "a/0/0")
    end_ms = int(await run.client.zscore(run.keys.leases, "a/0/0"))

    await abandon(run, until_ms=end_ms - 1)

    assert (await run.hash_of("ledger"))[b"a/0/0"] == b"open:1:writer"


HOUR_MS = 3_600_000


async def test_live_lease_has_not_ended_at_a_future_time(run: Any) -> None:
    # The planner read the clock, which was then set back by an hour.
    await run.open("a")

    await abandon(run, until_ms=await run.server_ms() + HOUR_MS)

    assert (await run.hash_of("ledger"))[b"a/0/0"] == b"open:1:writer"


@pytest.mark.parametrize(
    ("rescue", "ahead_ms"),
    [
        ("heartbeat", 0),
        ("heartbeat", HOUR_MS),  # the clock was set back in between
        ("adopted", 0),
        ("adopted, and silent again", 0),
    ],
)
async def test_trajectory_rescued_between_list_and_end_is_kept(
    run: Any, rescue: str, ahead_ms: int
) -> None:
    await run.open("a")
    await lapse(run, "a/0/0")
    (found,) = await list_lapsed_async(run.client, run.name)
    until_ms = await run.server_ms() + ahead_ms
    if rescue == "heartbeat":
        command = heartbeat_command(run.name, [("a/0/0", 1)], writer="writer")
    else:
        command = adopt_command(run.name, "a/0/0", writer="second")
    await run_command_async(run.client, command)
    if rescue == "adopted, and silent again":
        await run.client.zadd(run.keys.leases, {"a/0/0": until_ms - 1})

    was_abandoned = await end_lapsed(run.term, [found], until_ms=until_ms)

    assert not was_abandoned
    assert (await run.hash_of("ledger"))[b"a/0/0"].startswith(b"open:")


async def test_writer_of_an_abandoned_trajectory_is_refused_at_its_next_turn(run: Any) -> None:
    await run.open("a")
    await run.append(b"turn 0000", trajectory_id="a/0/0")
    await lapse(run, "a/0/0", "a/1/0")

    await abandon(run)

    for late in ({"trajectory_id": "a/0/0", "first": 1, "lease": "1"}, {"trajectory_id": "a/1/0"}):
        with pytest.raises(FencedError):
            await run.append(b"late", **late)
    (answer,) = await run.seal("a", 0)
    assert answer.startswith(b"FENCED a/0/0 is abandoned:")
    with pytest.raises(ConflictError, match="already abandoned"):
        await run_command_async(run.client, adopt_command(run.name, "a/0/0", writer="second"))


async def test_tombstone_of_an_abandoned_trajectory_has_the_reason(run: Any) -> None:
    await run.open("a")
    await run.append(b"turn", trajectory_id="a/0/0")

    await run.release("a/0/0", "a/1/0", abandoned={"a/0/0"})

    with pytest.raises(FencedError, match="abandoned, and its payload released"):
        await run.append(b"turn", trajectory_id="a/0/0")
    with pytest.raises(FencedError, match="is finished, and its payload released"):
        await run.append(b"turn", trajectory_id="a/1/0")


@pytest.mark.parametrize("seal", [encode_event(sealed("a", sample=0)), b"unreadable"])
async def test_stored_seal_counts_if_its_writer_died_before_the_event(
    run: Any, seal: bytes
) -> None:
    await run.open("a", num_samples=3)
    await run.append(b"turn 0000", seal, trajectory_id="a/0/0", seals=True)
    await run.append(b"turn 0000", seal, trajectory_id="a/2/0", seals=True)
    await run.client.delete(keys.trajectory_keys(run.name, "a/2/0").turns)
    await lapse(run, "a/0/0", "a/1/0", "a/2/0")

    await abandon(run)

    assert (await run.hash_of("ledger"))[b"a/0/0"] == b"sealed:1"
    assert (await run.hash_of("ledger"))[b"a/1/0"].startswith(b"abandoned:")
    assert (await run.hash_of("ledger"))[b"a/2/0"].startswith(b"abandoned:")
    (_, fields), *_ = (await run.client.xrange(run.keys.events))[1:]
    assert fields == {b"r": seal, b"t": b"a/0/0"}
    assert await run.client.zcard(run.keys.leases) == 0
    run.ledger().check()


async def test_late_seal_of_a_writer_that_lost_its_trajectory_is_refused(run: Any) -> None:
    # Its successor died before it could raise the epoch of the payload.
    await run.open("a")
    await lapse(run, "a/0/0")
    await run_command_async(run.client, adopt_command(run.name, "a/0/0", writer="second"))
    await run.append(
        b"turn 0000", encode_event(sealed("a", sample=0)), trajectory_id="a/0/0", seals=True
    )
    await lapse(run, "a/0/0")

    await abandon(run)

    assert (await run.hash_of("ledger"))[b"a/0/0"] == b"abandoned:the lease of second ended"
    run.ledger().check()


async def test_more_than_a_page_is_abandoned_page_by_page(run: Any) -> None:
    num_samples = MAX_LAPSED + 5
    await run.open("a", num_samples=num_samples)
    await lapse(run, *(f"a/{sample}/0" for sample in range(num_samples)))

    has_more = [await abandon(run), await abandon(run)]

    assert has_more == [True, False]
    counts = run.ledger()
    counts.check()
    assert counts.by_state[TrajectoryState.ABANDONED] == num_samples


KEY = TrajectoryKey("g", 0)


async def send_all(outbox: Outbox, link: Link, *, now_s: float) -> None:
    """Every round that there is at this time of the writer's clock."""
    while (sent := outbox.next_round(now_s)) is not None:
        replies = await asyncio.to_thread(link.exchange, pack_round(sent), num_replies(sent))
        outbox.answered(sent, parse_replies(sent, replies), now_s=now_s)


@pytest.mark.both_servers
async def test_late_turn_writes_nothing_and_its_writer_gets_an_error(run: Any, server: Any) -> None:
    # A late turn was stored although no ledger named it, so it was never released.
    limits = {"max_inflight_bytes": 1 << 20, "timeout_s": 10.0, "admission_timeout_s": 10.0}
    outbox = Outbox(run.name, "w", jitter=lambda: 0.0, keep_s=0.0, **limits)
    link = Link(server.url)
    opened = GroupOpened(group_id="g", prompt_uid="", num_samples=1)
    (queue,) = outbox.admissions.request(opened, [KEY])
    for now_s in (0.0, 1.0):  # it opens, and has its lease renewed
        await send_all(outbox, link, now_s=now_s)
    payload = keys.trajectory_keys(run.name, "g/0/0")

    await run.client.zadd(run.keys.leases, {"g/0/0": 1})  # which ended long ago
    await abandon_lapsed(run.term, until_ms=1)
    await run.release("g/0/0", abandoned={"g/0/0"})
    await run.client.delete(payload.meta)  # as it expires by itself some time later
    written = PendingWrite()
    outbox.append(queue, TrajectoryDraft(KEY).add(turn("a", "B")), written)
    await send_all(outbox, link, now_s=10_000.0)
    link.close()

    with pytest.raises(FencedError, match="g/0/0 is abandoned: the lease of w ended"):
        written.raise_error()
    assert not await run.client.exists(payload.turns, payload.meta)
