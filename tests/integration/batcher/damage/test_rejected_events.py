"""Events that cannot be read or folded: each one is set aside, and the run continues."""

import asyncio
import io
import time
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from testkit import group, sealed, wait_until_async
from turnstream.records.encoding import EVENT, write_frame
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.types import ConfigRevised, GroupOpened
from turnstream_server.console.dead_letters import list_dead_letters, print_dead_letters
from turnstream_server.ledger.admin.dead_letters import read_dead_letters

SEAL = encode_event(sealed("elsewhere"))
UNREADABLE: dict[str, Mapping[str, bytes]] = {
    "field_has_another_name": {"s": SEAL},
    "field_name_is_no_utf8": {b"\xf2": SEAL},  # type: ignore[dict-item]
    "record_is_empty": {"r": b""},
    "t_is_no_trajectory": {"r": SEAL, "t": b"nonsense"},
    "t_is_no_utf8": {"r": SEAL, "t": b"\xe7/0/0"},
    "revision_is_unknown": {"r": encode_event(ConfigRevised(revision=99, step=1))},
    "group_without_samples": {
        "r": encode_event(GroupOpened(group_id="none", prompt_uid="", num_samples=0))
    },
    "group_needs_more_than_it_has": {
        "r": encode_event(GroupOpened(group_id="few", prompt_uid="", num_samples=2, num_needed=3))
    },
    "name_is_too_long": {"r": encode_event(sealed("x" * 2_000))},
    "number_of_attempt_is_too_large": {"r": encode_event(sealed("g0", attempt=2**32 - 1))},
    "record_is_too_large": {"r": SEAL + bytes(2**20)},
}


def add_event(cluster: Any, run: str, fields: Mapping[Any, Any], *, event_id: str = "*") -> str:
    added: Any = cluster.client.xadd(keys.run_keys(run).events, dict(fields), id=event_id)
    return added.decode()


async def test_unreadable_event_is_set_aside_and_the_run_continues(cluster: Any) -> None:
    run = cluster.create_run(batch_groups=1)
    await cluster.publish(run, group("g0"))
    kinds = {add_event(cluster, run, fields): kind for kind, fields in UNREADABLE.items()}
    await cluster.publish(run, group("g1"))

    trainer = await cluster.start_trainer(run)
    (first,) = await trainer.get(1, wait_s=15)
    await trainer.stepped([first])
    (second,) = await trainer.get(2, wait_s=15)

    names = {*first.mini_batch.rows.trajectory_id, *second.mini_batch.rows.trajectory_id}
    assert {name.partition("/")[0] for name in names} == {"g0", "g1"}
    kept = [each.name for each in cluster.dead_letters(run).events]
    assert [kinds[each] for each in kept] == [*UNREADABLE]
    assert kept[-1] in cluster.why(run)


async def test_event_of_a_distant_time_does_not_stop_the_run(cluster: Any) -> None:
    # One damaged byte of an event's time makes it centuries late, and all after it.
    run = cluster.create_run(batch_groups=1)
    await cluster.publish(run, group("g0"))
    event_id = f"{2**63}-0"
    add_event(cluster, run, {"s": SEAL}, event_id=event_id)
    await cluster.publish(run, group("g1"))

    trainer = await cluster.start_trainer(run)
    await trainer.stepped(await trainer.get(1, wait_s=15))
    (pulled,) = await trainer.get(2, wait_s=15)

    assert {name.partition("/")[0] for name in pulled.mini_batch.rows.trajectory_id} == {"g1"}
    assert [each.name for each in cluster.dead_letters(run).events] == [event_id]
    shown = io.StringIO()
    print_dead_letters(list_dead_letters(cluster.url, run), Console(file=shown, width=200))
    assert f"{2**63} ms" in shown.getvalue()


@pytest.mark.parametrize("posted", [{}, {"t": b"elsewhere/0/0"}])
async def test_newer_record_stops_the_run_and_sets_nothing_aside(
    cluster: Any, posted: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cluster.create_run(batch_groups=1)
    await cluster.publish(run, group("g0"))
    with monkeypatch.context() as patched:
        patched.setattr("turnstream.records.encoding.MAJOR_VERSION", 2)
        newer = write_frame(EVENT, SEAL[8:-4].rstrip(b"\0"))
    event_id = add_event(cluster, run, {"r": newer, **posted})
    await cluster.start_batcher()

    await wait_until_async(
        lambda: "newer release" in cluster.why(run), describe="why names the newer release"
    )

    assert event_id in cluster.why(run)
    found = cluster.dead_letters(run)
    assert found.trajectories == found.events == ()


NUM_SMALL, NUM_LARGE = 3_000, 20
LONGEST_TURN_CPU_S = 0.5


def write_junk(url: str, run: str) -> None:
    """Write small records, records of a megabyte, and records beyond the limit."""
    with connect(url) as client:
        stream = keys.run_keys(run).events
        pipeline = client.pipeline(transaction=False)
        for number in range(NUM_SMALL):
            pipeline.xadd(stream, {"r": b"junk %d" % number})
        pipeline.execute()
        for _ in range(NUM_LARGE):
            client.xadd(stream, {"r": bytes(1_000_000)})
            client.xadd(stream, {"r": bytes(3_000_000)})


def num_rejected(url: str, run: str) -> int:
    with connect(url) as client:
        found: Any = client.zcard(keys.run_keys(run).rejected)
    return found


async def longest_turn_cpu_s(until: asyncio.Event) -> float:
    """Return the most CPU seconds that the event loop spent before it ran this task again."""
    longest_s = 0.0
    while not until.is_set():
        started_s = time.thread_time()
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, time.thread_time() - started_s)
    return longest_s


async def test_junk_in_one_run_does_not_delay_another(cluster: Any, caplog: Any) -> None:
    healthy, hostile = (cluster.create_run(batch_groups=1) for _ in range(2))
    trainer = cluster.trainer(await cluster.start_batcher(), healthy)
    await trainer.start()
    await asyncio.to_thread(write_junk, cluster.url, hostile)
    is_done = asyncio.Event()
    watching = asyncio.create_task(longest_turn_cpu_s(is_done))

    step = 0
    while await asyncio.to_thread(num_rejected, cluster.url, hostile) < NUM_SMALL + 2 * NUM_LARGE:
        step += 1
        await cluster.publish(healthy, group(f"g{step}"))
        await trainer.stepped(await trainer.get(step))
    is_done.set()

    assert await watching < LONGEST_TURN_CPU_S
    assert len(read_dead_letters(cluster.client, hostile).events) == 1_000
    assert len([each for each in caplog.records if "events are rejected" in each.message]) < 100
