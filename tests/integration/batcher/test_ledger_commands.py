"""The ledger, histories and batches as commands print them, also of damaged runs."""

import asyncio
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from testkit import group, ids, trajectory, wait_until, wait_until_async
from turnstream.batching.config import GroupFilter
from turnstream.errors import CorruptRecordError, TurnstreamError
from turnstream.generator import Publisher
from turnstream.records.tag_statistics import shown_figures
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.client.trajectory_names import keys_named
from turnstream.store.run.evals import eval_results
from turnstream.types import GroupOpened, Purpose, Status
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.console.batches import print_batch, read_batch, write_batch
from turnstream_server.console.ledger import print_ledger, read_run_ledger, read_trajectory
from turnstream_server.console.runs import read_status
from turnstream_server.ledger.core.scan import entry_ms, readable_events, server_ms
from turnstream_server.ledger.queries.run_snapshot import read_snapshot
from turnstream_server.ledger.release.compact_records import find_past_step, read_past_batch
from turnstream_server.screen import Screen

EQUAL = (trajectory(sample=0), trajectory(sample=1))
SMALL = Upkeep(snapshot_events=1, snapshot_steps=1)


async def ledger(cluster, run):
    return await asyncio.to_thread(read_run_ledger, cluster.url, run)


async def history(cluster, run, trajectory_id):
    return await asyncio.to_thread(read_trajectory, cluster.url, run, trajectory_id)


def opened_ms(cluster, run):
    """When each group was opened whose event is kept."""
    return {
        event.group_id: entry_ms(entry_id)
        for entry_id, event in readable_events(cluster.client, run)
        if isinstance(event, GroupOpened)
    }


async def abandon(cluster, run, *reasons):
    def send():
        with Publisher(cluster.url, run) as publisher, publisher.group("a", len(reasons)) as opened:
            for sample, reason in enumerate(reasons):
                opened.trajectory(sample).abandon(reason).result(10)

    await asyncio.to_thread(send)


ACCURACY = GroupFilter(kind="mean_range", metric="accuracy", low=0.25, high=0.75)


def judged(name, *accuracies):
    """Return a group with rewards 1, 0, ..., and these accuracies; None for none."""
    members = [
        trajectory(
            sample=sample,
            reward=float(sample == 0),
            metrics={} if accuracy is None else {"accuracy": accuracy},
        )
        for sample, accuracy in enumerate(accuracies)
    ]
    return group(name, *members)


@pytest.mark.parametrize("is_compacted", [False, True])
async def test_filtered_group_keeps_the_metric_the_value_and_the_limit(cluster, is_compacted: bool):
    # Groups with different means count together, also after the ledger was folded.
    run = cluster.create_run(batch_groups=1, group_filters=(ACCURACY,))
    upkeep = replace(SMALL, compact_ended=1) if is_compacted else Upkeep()
    trainer = cluster.trainer(await cluster.start_batcher(upkeep=upkeep), run)
    await trainer.start()
    dropped = judged("low", 0, 0.25), judged("lower", 0, 0), judged("none", None, 0.5)
    await cluster.publish(run, *dropped, judged("mid", 0.5, 0.75))
    (pulled,) = await trainer.get(1)
    await trainer.stepped((pulled,))
    names = keys.run_keys(run)
    if is_compacted:
        await wait_until_async(
            lambda: cluster.client.hlen(names.untrained) > 0, describe="the record"
        )
        await wait_until_async(lambda: cluster.client.hlen(names.ledger) == 2, describe="the fold")

    seen, low = await ledger(cluster, run), await history(cluster, run, "low/1/0")
    (status,) = await asyncio.to_thread(read_status, cluster.url, run)

    below = "the mean of metric 'accuracy' is below low=0.25"
    assert pulled.mini_batch.rows.group_id == ["mid", "mid"]
    assert (low["state"], low["reason"]) == ("filtered", f"{below} (0.125)")
    assert seen["states"]["filtered"]["reasons"] == {
        below: 4,
        "metric 'accuracy' is missing": 2,
    }
    assert status["ledger"]["filtered"] == 6
    if is_compacted:
        assert cluster.client.hget(names.reasons, f"filtered:{below}") == b"4"


async def test_error_trajectory_is_excluded_with_its_reason(cluster):
    failed = trajectory(sample=2, status=Status.ERROR)
    never_started = replace(failed, sample=3, turns=(), reward=None)
    members = (trajectory(sample=0), trajectory(sample=1, reward=0.0), failed, never_started)
    evaluated = replace(group("e", *members), purpose=Purpose.EVAL)
    run, trainer = await cluster.started(evaluated, group("a", *members), batch_groups=1)
    (pulled,) = await trainer.get(1)

    seen = [await history(cluster, run, f"a/{sample}/0") for sample in (2, 3)]
    (result,) = await asyncio.to_thread(eval_results, cluster.client, run)

    assert pulled.mini_batch.rows.trajectory_id == ["a/0/0", "a/1/0"]
    assert [(each["state"], each["reason"]) for each in seen] == [
        ("incomplete", f"sample {n} ended with status 'error', and error_trajectories='drop'")
        for n in (2, 3)
    ]
    assert (result.num_trajectories, result.reward.num) == (4, 4)


@pytest.mark.parametrize("upkeep", [Upkeep(), SMALL])
async def test_why_counts_no_masked_member_whose_reward_is_left_out(cluster, upkeep):
    run = cluster.create_run(batch_groups=1, mask_truncated=True, masked_reward="leave_out")
    trainer = cluster.trainer(await cluster.start_batcher(upkeep=upkeep), run)
    await trainer.start()

    def send():
        with (
            Publisher(cluster.url, run) as publisher,
            publisher.group("a", 3, num_needed=2) as group,
        ):
            for trajectory, status in zip(group, ("truncated", "completed"), strict=False):
                trajectory.append([1], [2], policy_version=0)
                trajectory.seal(reward=1.0, status=status)
            return read_snapshot(cluster.client, run)

    seen = await asyncio.to_thread(send)

    assert (seen.num_ready, seen.num_waiting) == (0, 1)
    assert (seen.members[0].num_sealed, seen.members[0].num_needed) == (1, 2)


async def test_longest_hanging_trajectory_is_the_oldest_without_its_event(cluster):
    run = cluster.create_run(batch_groups=1)
    cluster.client.config_set("stream-node-max-entries", 1)  # so that each event may go by itself
    trainer = cluster.trainer(await cluster.start_batcher(upkeep=SMALL), run)
    cluster.open_group(run, "old/1", "old%2F1/0/0")
    cluster.open_group(run, "evaluated", "evaluated/0/0", purpose=Purpose.EVAL)
    born_ms = opened_ms(cluster, run)
    await trainer.start()
    for step in range(1, 6):
        await cluster.publish(run, group(f"g{step}"))
        await trainer.stepped(await trainer.get(step))
    await wait_until_async(lambda: "g1" not in opened_ms(cluster, run), describe="trimmed events")
    cluster.open_group(run, "young", "young/0/0")

    least_s = (server_ms(cluster.client) - born_ms["old/1"]) / 1_000
    waiting = await asyncio.to_thread(read_snapshot, cluster.client, run)
    most_s = (server_ms(cluster.client) - born_ms["old/1"]) / 1_000

    assert [each.key.group_id for each in waiting.members] == ["old/1", "young"]
    assert least_s <= (waiting.members[0].since_s or 0.0) <= most_s


async def test_json_has_every_reason_and_the_table_counts_the_rest(cluster):
    run = cluster.create_run()
    await abandon(cluster, run, *(f"error {min(sample, 6)}" for sample in range(12)))
    screen = StringIO()

    content = await ledger(cluster, run)
    reasons = content["states"]["abandoned"]["reasons"]
    last = await history(cluster, run, "a/11/0")
    print_ledger(content, Screen(screen, width=120))

    assert (last["state"], last["reason"]) == ("abandoned", "error 6")
    assert reasons == {"error 6": 6, **{f"error {n}": 1 for n in range(6)}}
    assert [n for n in range(7) if f"x error {n} " in screen.getvalue()] == [0, 1, 2, 3, 6]
    assert "and 2 others, of 2 trajectories" in screen.getvalue()


@pytest.mark.parametrize("dp_rank", [0, 1])
async def test_the_bytes_of_a_batch_are_those_that_its_rank_gets(cluster, tmp_path: Path, dp_rank):
    run, trainer = await cluster.started(
        group("a"), group("b"), batch_groups=2, mini_batch_groups=1, dp_world_size=2
    )
    pulled = await trainer.get(1, dp_rank=dp_rank)

    paths = await asyncio.to_thread(
        lambda: write_batch(
            cluster.url, run, 1, tmp_path / "out.arrow", dp_rank=dp_rank, dp_world_size=2
        )
    )

    assert [path.name for path in paths] == ["out.arrow", "out-1.arrow"]
    assert [path.read_bytes() for path in paths] == [each.data for each in pulled]


LABELLED = (
    trajectory(sample=0, tags={"env": "maze"}, metrics={"turns": 2}),
    trajectory(sample=1, reward=0.0, tags={"env": "maze"}, metrics={"turns": 4}),
)


async def test_labels_are_summed_once_per_batch_for_workers_and_commands(cluster):
    run, trainer = await cluster.started(
        group("a", *LABELLED), group("b"), batch_groups=2, mini_batch_groups=1, dp_world_size=2
    )

    first, second = await trainer.get(1, dp_rank=1)
    seen = await asyncio.to_thread(read_batch, cluster.url, run, 1)
    screen = StringIO()
    print_batch(run, seen, Screen(screen, width=120), show_all=True)

    figures = first.mini_batch.info.figures
    assert figures.metrics["turns"].mean == 3.0
    assert figures.tags["env"].values["maze"].reward_mean == 0.5
    assert not second.mini_batch.info.figures
    assert seen["figures"] == shown_figures(figures)
    printed = screen.getvalue()
    assert re.search(r"turns +│ +2 +│ +3 +│ +2 +│ +4", printed)
    assert re.search(r"env +│ +maze +│ +2 +│ +0.5", printed)


NAMES = ("open/0/0", "g4/0/0", "g1/0/0", "ended/0/0")
"""Trajectories in different places: open, planned, and in compact records."""

READ = (
    *("frontier", "config", "ledger", "counts", "batches", "conflicts", "payload_bytes", "budget"),
    *("finished_batches", "untrained", "reasons", "times", "observers", "clock", "dead_letters"),
    *("rewards", "archive_files", "retry"),
)
"""Hashes of a run that the ledger reads."""


@pytest.fixture
async def worn_run(cluster: Any) -> str:
    """A run with trajectories in every place that the ledger reads; its batcher has stopped."""
    run = cluster.create_run(batch_groups=1, max_staleness=9, retain_checkpoints=1)
    trainer = await cluster.start_trainer(run, upkeep=replace(SMALL, compact_ended=2))
    await cluster.publish(run, *(group(f"g{step}") for step in range(1, 5)))
    await trainer.train(1, 2, 3)
    await trainer.get(4)
    names = keys.run_keys(run)

    def leave_others() -> None:
        with Publisher(cluster.url, run, writer="gen-1") as publisher:
            for name in ("ended", "ended2"):
                with publisher.group(name, 2):
                    pass
            publisher.trajectory("open", 0, num_samples=2).append(ids("ab"), ids("c")).result(10)
            for records in (names.untrained, names.finished_batches):
                wait_until(lambda key=records: cluster.client.hlen(key) > 0, describe=records)

    await asyncio.to_thread(leave_others)
    await cluster.close()  # no batcher repairs or meets the damage
    with connect(cluster.url) as client:
        client.hset(names.conflicts, mapping={"num": 1, "last": "g1/0/0: another turn"})
        client.hset(names.dead_letters, "g4/0/0", "1700000000000:100")
        client.hset(names.observers, "o", "1:99999999999999:60000")
    return run


def damage_all(client: Any, key: str) -> Iterator[str]:
    """Damage each field of a hash, and then its type; yield the name of each damage."""
    before = client.dump(key)
    for field, value in client.hgetall(key).items():
        for damaged in (b"", b"no number", bytes([(value or b"0")[0] ^ 0x80]) + value[1:]):
            client.hset(key, field, damaged)
            yield f"{key} {field} {damaged[:20]}"
            client.hset(key, field, value)
    if before is not None:
        client.delete(key)
        client.rpush(key, "a list")
        yield f"{key} of another type"
        client.restore(key, 0, before, replace=True)


@pytest.mark.timeout(600)
async def test_every_damaged_field_is_a_typed_error_of_ledger(cluster: Any, worn_run: str) -> None:
    found = await asyncio.to_thread(_damage_all, cluster.url, worn_run)

    assert found == []


def _damage_all(url: str, run: str) -> list[str]:
    """Return the errors that are untyped, or name no key."""
    wrong: list[str] = []
    num_raised = 0
    names = keys.run_keys(run)
    with connect(url) as client:
        reads: list[Callable[[], Any]] = [
            lambda: read_run_ledger(url, run),
            lambda: read_past_batch(client, run, 1),
            lambda: find_past_step(client, run, keys_named("g1/0/0")[-1]),
            *(functools.partial(read_trajectory, url, run, name) for name in NAMES),
        ]
        for place in itertools.chain(*(damage_all(client, getattr(names, each)) for each in READ)):
            for read in reads:
                try:
                    read()
                except TurnstreamError as error:
                    num_raised += 1
                    is_named = "ts:{" in str(error) and "\n" not in str(error)
                    if isinstance(error, CorruptRecordError) and not is_named:
                        wrong.append(f"{place}: unnamed: {error}")
                except Exception as error:  # noqa: BLE001 - that is what is looked for
                    wrong.append(f"{place}: {type(error).__name__} {error}")
    assert num_raised > 100
    return wrong
