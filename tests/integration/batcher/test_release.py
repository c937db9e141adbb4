"""Finished steps and trajectories are released, at a pace that bounds the backlog."""

import asyncio
import itertools
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from testkit import ZERO_VARIANCE, group, trajectory, wait_until_async
from turnstream.errors import FencedError, ReleasedError
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream_server.batcher.planner import releaser, snapshotting
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.console.batches import read_batch, write_batch
from turnstream_server.console.ledger import read_run_ledger, read_trajectory
from turnstream_server.ledger.queries.ledger import read_budget
from turnstream_server.ledger.release.release import read_release_state

EQUAL = (trajectory(sample=0), trajectory(sample=1))
SMALL = Upkeep(snapshot_events=1, snapshot_steps=1, compact_ended=2)
HISTORY_FACTS = ("state", "reason", "step")
ACTS = (
    *("advance_watermark", "release_payload", "release_bytes", "compact_batch", "finish_batch"),
    *("compact_ended", "save_snapshot", "trim_events"),
)


def payload_ids(cluster, run: str) -> set[str]:
    start = keys.trajectory_keys(run, "x").turns.partition("/x}")[0]
    found: Any = cluster.client.keys(start.replace("*", "?") + "/*:turns")
    return {name.decode().partition("/")[2].partition("}")[0] for name in found}


def held_ids(cluster, run: str) -> set[str]:
    """Trajectories for which the run holds bytes, as many as its sums say."""
    entries: Any = cluster.client.hgetall(keys.run_keys(run).payload_bytes)
    sums = read_budget(cluster.client, run)
    reserved = sum(int(value[1:]) for value in entries.values() if value.startswith(b"r"))
    stored = sum(int(value) for value in entries.values() if not value.startswith(b"r"))
    assert (sums.reserved, sums.stored + sums.planned) == (reserved, stored)
    return {name.decode() for name in entries}


async def settled(cluster, run: str, *, folded: int = 0, filtered: int = 0) -> None:
    """Wait until so many steps and so many filtered trajectories are compact."""
    names = keys.run_keys(run)

    def is_settled() -> bool:
        cluster.ledger(run)
        num_steps = int(cluster.client.hget(names.frontier, "folded") or 0)
        num_filtered = sum(map(int, cluster.client.hvals(names.reasons)))
        return (num_steps, num_filtered) == (folded, filtered)

    await wait_until_async(is_settled, 100.0, describe=f"{folded} batches, {filtered} ends")


async def test_a_released_step_is_refused_with_its_number_and_the_oldest_kept(cluster):
    run = cluster.create_run(batch_groups=1)
    trainer = cluster.trainer(await cluster.start_batcher(upkeep=SMALL), run)
    await cluster.publish(run, *(group(f"g{i}") for i in range(1, 5)))
    await trainer.start()
    tokens = await trainer.train(*range(1, 5))
    await settled(cluster, run, folded=3)

    other = cluster.trainer(await cluster.start_batcher(), run)  # it has never seen that plan
    other.session_epoch = trainer.session_epoch
    with pytest.raises(ReleasedError, match=r"step 2 is no longer retained: the oldest .* is 4"):
        await other.get(2)
    with pytest.raises(ReleasedError, match="token names step 2, but the steps up to 3"):
        await trainer.start("back", token=str(tokens[1]))

    await trainer.start("further", token=str(tokens[2]))
    (again,) = await trainer.get(4)
    assert again.mini_batch.rows.group_id == ["g4", "g4"]


async def test_leader_with_a_snapshot_continues_the_same_chain(cluster):
    run = cluster.create_run(batch_groups=1)
    first = await cluster.start_batcher(upkeep=SMALL)
    trainer = cluster.trainer(first, run)
    many = [group(f"g{i}") for i in range(1, 60)]
    await cluster.publish(run, *many)
    await trainer.start()
    await trainer.train(*range(1, 58))
    await settled(cluster, run, folded=56)
    for name in ("next", "last"):  # a snapshot for which the folded groups are forgotten
        await cluster.publish(run, group(name))
        await _whole_snapshot(cluster, run)
    await first.stop()
    names = keys.run_keys(run)
    assert cluster.client.xlen(names.events) < 3 * len(many) - 50
    hash_before = _hash(cluster, run, 59)

    second = await cluster.start_batcher(upkeep=SMALL)
    trainer = cluster.trainer(second, run)
    await trainer.start("later", token=f"v1:main:57:{_hash(cluster, run, 57)}")
    await trainer.train(*range(58, 60), commits=False)
    (pulled,) = await trainer.get(60)

    assert pulled.mini_batch.rows.group_id == ["next", "next"]
    assert pulled.mini_batch.rows.row_id.tolist() == [118, 119]
    assert _previous_hash(cluster, run, 60) == hash_before
    await trainer.train(*range(60, 62), commits=False)
    await trainer.refused(62, words="0 of 1 groups ready, and no generator")


async def test_snapshot_above_its_limit_is_not_stored(cluster, monkeypatch, caplog):
    monkeypatch.setattr(snapshotting, "MAX_SNAPSHOT_BYTES", 1)
    run = cluster.create_run(batch_groups=1)
    await cluster.start_batcher(upkeep=SMALL)

    await cluster.publish(run, group("g"))
    await wait_until_async(lambda: "is not stored" in caplog.text, describe="the warning")

    assert cluster.client.hgetall(keys.run_keys(run).snapshot) == {}
    assert cluster.client.xlen(keys.run_keys(run).events) > 0


async def test_compact_records_still_answer_queries(cluster, tmp_path):
    run = cluster.create_run(batch_groups=1, group_filters=ZERO_VARIANCE)
    trainer = cluster.trainer(await cluster.start_batcher(upkeep=SMALL), run)
    await cluster.publish(run, group("equal", *EQUAL), *(group(f"g{i}") for i in range(1, 4)))
    await trainer.start()
    (first,) = await trainer.get(1)
    await trainer.train(*range(1, 4))
    await settled(cluster, run, folded=2, filtered=2)

    def ask():
        batch = read_batch(cluster.url, run, 1)
        ledger = read_run_ledger(cluster.url, run)
        trained, equal = [
            read_trajectory(cluster.url, run, each) for each in ("g1/1/0", "equal/0/0")
        ]
        return batch, ledger, trained, equal

    batch, ledger, trained, equal = await asyncio.to_thread(ask)

    assert batch["state"] == "committed"
    assert batch["manifest_hash"] == first.mini_batch.info.manifest_hash
    assert [each["id"] for each in batch["trajectories"]] == ["g1/0/0", "g1/1/0"]
    assert [trained[fact] for fact in HISTORY_FACTS] == ["committed", "", 1]
    reason = "all values of the reward are equal"
    assert [equal[fact] for fact in HISTORY_FACTS] == ["filtered", f"{reason} (1)", None]
    assert ledger["states"]["filtered"]["reasons"] == {reason: 2}
    with pytest.raises(ReleasedError, match=r"step 1 is no longer retained: the oldest .* is 3"):
        await asyncio.to_thread(
            lambda: write_batch(cluster.url, run, 1, tmp_path / "x", dp_rank=0, dp_world_size=1)
        )


@pytest.mark.parametrize("act", ACTS)
async def test_release_resumes_wherever_a_leader_was_killed(cluster, start_batcher_process, act):
    run = cluster.create_run(batch_groups=1, group_filters=ZERO_VARIANCE)
    first = await cluster.start_batcher(lease_s=0.6)
    trainer = cluster.trainer(first, run)
    for i in range(1, 7):
        await cluster.publish(run, group(f"g{i}"), group(f"equal{i}", *EQUAL))
    await trainer.start()
    tokens = await trainer.train(*range(1, 5), commits=False)
    await first.stop()

    options = {"snapshot_events": 1, "snapshot_steps": 1, "compact_ended": 2}
    doomed = start_batcher_process(f"{act}.before", upkeep=options)
    address = await asyncio.to_thread(doomed.stdout.readline)
    committing = asyncio.create_task(_commit_all(cluster.trainer(address.strip(), run)))
    status = await asyncio.to_thread(doomed.wait, 60)
    await asyncio.gather(committing, return_exceptions=True)
    cluster.ledger(run)
    frontier = cluster.frontier(run)
    retained = {f"g{i}/{sample}/0" for i in range(frontier.released + 1, 5) for sample in (0, 1)}
    lost = retained - payload_ids(cluster, run)
    not_counted = payload_ids(cluster, run) - held_ids(cluster, run)
    trainer = cluster.trainer(await cluster.start_batcher(lease_s=0.6, upkeep=SMALL), run)
    await trainer.start(
        "s3", token=str(tokens[frontier.committed - 1]) if frontier.committed else ""
    )
    rest = range(frontier.committed + 1, 7)
    await trainer.train(*rest)
    await settled(cluster, run, folded=5, filtered=12)

    assert status == -signal.SIGKILL
    assert not_counted == set()
    assert held_ids(cluster, run) == payload_ids(cluster, run)
    assert lost == set()
    assert payload_ids(cluster, run) == {"g6/0/0", "g6/1/0"}


async def _commit_all(trainer) -> None:
    await trainer.start("s2")
    await trainer.train(*range(1, 5))


async def _whole_snapshot(cluster, run: str) -> None:
    """Wait for a snapshot that includes every event."""
    names = keys.run_keys(run)

    async def is_whole() -> bool:
        events: Any = cluster.client.xrevrange(names.events, count=1)
        return cluster.client.hget(names.snapshot, "position") == events[0][0]

    await wait_until_async(is_whole, describe="a snapshot of everything")


def _hash(cluster, run: str, step: int) -> str:
    entry: Any = cluster.client.hget(keys.run_keys(run).batches, str(step))
    return entry.partition(b":")[2].decode()


def _previous_hash(cluster, run: str, step: int) -> str:
    return read_batch(cluster.url, run, step)["previous_hash"]


async def test_a_released_step_whose_plan_is_still_there_is_refused_too(cluster):
    run, trainer = await cluster.started(group("g1"), batch_groups=1, retain_checkpoints=1)
    await trainer.train(1)

    await wait_until_async(
        lambda: not payload_ids(cluster, run), describe="the release of the payload"
    )
    with pytest.raises(ReleasedError, match="step 1 is no longer retained"):
        await trainer.get(1)


async def test_stale_planner_releases_no_step_that_another_has_folded(cluster):
    run = cluster.create_run(batch_groups=1)
    trainer = cluster.trainer(await cluster.start_batcher(upkeep=SMALL), run)
    await cluster.publish(run, *(group(f"g{i}") for i in range(1, 5)))
    await trainer.start()
    await trainer.train(*range(1, 5))
    await settled(cluster, run, folded=3)

    async with connect_async(cluster.url) as client:
        before = replace(await read_release_state(client, run), folded=0)
        term: Any = SimpleNamespace(client=client, run=run)
        view: Any = None  # not used before the check
        stale = releaser.Releaser(term, view, owner="stale", upkeep=SMALL)
        with pytest.raises(FencedError, match="another planner has folded step 1"):
            await stale._release_batches(before)


async def test_rounds_follow_at_once_while_released_steps_are_left(cluster, monkeypatch):
    monkeypatch.setattr(releaser, "SHORTEST_PAUSE_S", 1_000.0)
    monkeypatch.setattr(releaser, "ROUND_SLICE", 1)
    are_committed, run_round = asyncio.Event(), releaser.Releaser.run_round

    async def round_after_commits(self: releaser.Releaser) -> bool:
        await are_committed.wait()
        return await run_round(self)

    monkeypatch.setattr(releaser.Releaser, "run_round", round_after_commits)
    run = cluster.create_run(batch_groups=1)
    trainer = cluster.trainer(await cluster.start_batcher(), run)
    await cluster.publish(run, *(group(f"g{number}") for number in range(6)))
    await trainer.start()
    await trainer.train(*range(1, 7))
    are_committed.set()

    held = keys.run_keys(run).payload_bytes
    await wait_until_async(
        lambda: cluster.client.hlen(held) == 2, 60.0, describe="the release of five steps"
    )


async def test_search_that_finds_many_does_not_wait_for_its_rest(cluster, monkeypatch):
    num_searches, find_ended = itertools.count(), releaser.find_ended

    async def counted(*args: Any, **options: Any) -> Any:
        next(num_searches)
        return await find_ended(*args, **options)

    monkeypatch.setattr(releaser, "find_ended", counted)
    monkeypatch.setattr(releaser, "SEARCH_REST", 1_000_000)  # a rest longer than the test
    run = cluster.create_run(batch_groups=1, group_filters=ZERO_VARIANCE)
    await cluster.start_batcher()

    for number in (1, 2):
        await cluster.publish(run, group(f"g{number}", *EQUAL))
        await wait_until_async(
            lambda number=number: not payload_ids(cluster, run), describe=f"search {number}"
        )

    assert next(num_searches) >= 2
