"""Metrics of runs, against what the commands of `turnstream` show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import testkit
from testkit.services.clusters import Cluster
from testkit.services.scrapes import Scrape, own_scrape
from turnstream.store.client import keys
from turnstream.store.run.runs import close_run
from turnstream.store.waits.wait_reasons import reasons
from turnstream_server.batcher.serving import run_metrics
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.planning.manifests import read_plan
from turnstream_server.ledger.queries.run_facts import numbers_of
from turnstream_server.ledger.queries.run_snapshot import read_snapshot

PREFIX = "turnstream_batcher_"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_metrics, "FRESH_S", 0.0)


@pytest.fixture
async def cluster(server: EmbeddedServer) -> AsyncIterator[Cluster]:
    cluster = Cluster(server.url)
    yield cluster
    await cluster.close()


async def scrape() -> Scrape:
    return await asyncio.to_thread(own_scrape)


def kinds(found: Scrape, run: str) -> set[str]:
    return {kind for kind, name in found[f"{PREFIX}wait_reasons"] if name == run}


def pair(name: str) -> Any:
    turn = testkit.turn("ab", "CD")
    members = [testkit.trajectory(turn, sample=s, reward=float(s)) for s in range(2)]
    return testkit.group(name, *members)


async def test_metrics_of_a_run_are_those_of_the_commands(cluster: Cluster) -> None:
    run, trainer = await cluster.started(pair("g0"), pair("g1"), pair("g2"), batch_groups=2)
    await cluster.planned(run, 1)
    cluster.open_group(run, "open", "open/0/0", num_samples=2)
    await trainer.get(1)

    async def when_read() -> Scrape | None:
        found = await scrape()
        return found if found.value(f"{PREFIX}waiting_groups", run) == 1 else None

    found = await testkit.wait_until_async(when_read, describe="the open group in the planner")
    assert found is not None

    states = {
        state: n for (name, state), n in found[f"{PREFIX}trajectories"].items() if name == run
    }
    assert states == {str(k): float(n) for k, n in cluster.ledger(run).by_state.items()}
    assert found.value(f"{PREFIX}accepted_trajectories", run) == 7
    assert found.value(f"{PREFIX}ready_batches", run) == 1
    assert found.value(f"{PREFIX}ready_groups", run) == 1
    assert found.value(f"{PREFIX}waiting_groups", run) == 1
    stored = read_plan(cluster.client, run, 1)
    assert stored is not None
    batch = numbers_of(stored.manifest)
    for name, value in (
        ("padding_share", batch.padding_share),
        ("merge_ratio", batch.merge_ratio),
        ("reward_mean", batch.mean_reward),
        ("batch_trajectories", batch.num_trajectories),
        ("batch_tokens", batch.num_tokens),
    ):
        assert found.value(f"{PREFIX}{name}", run) == pytest.approx(value), name
    budget = read_snapshot(cluster.client, run).budget
    assert found.value(f"{PREFIX}run_bytes", "stored", run) == budget.stored > 0
    assert found.value(f"{PREFIX}store_bytes") > 0
    assert found.value(f"{PREFIX}store_up") == 1


async def test_ingest_counts_each_trajectory_once_in_any_number_of_terms(cluster: Cluster) -> None:
    run = cluster.create_run(batch_groups=1)
    await cluster.start_batcher(park_after_s=0.2)
    await cluster.publish(run, pair("g0"))
    await cluster.planned(run, 1)

    def is_parked() -> bool:
        return bool(cluster.client.hexists(keys.run_keys(run).leader, "parked"))

    await testkit.wait_until_async(is_parked, describe="a parked run")
    await cluster.publish(run, pair("g1"))
    await cluster.planned(run, 2)

    found = await scrape()

    assert found.value(f"{PREFIX}ingested_trajectories_total", "sealed", run) == 4
    assert found.value(f"{PREFIX}ingested_turns_total", run) == 4
    assert found.value(f"{PREFIX}ingested_tokens_total", run) == 16
    assert found.value(f"{PREFIX}ingested_bytes_total", run) > 0


async def test_wait_reasons_have_the_kinds_of_turnstream_why(cluster: Cluster) -> None:
    """The kinds that need no scan of the ledger."""
    batcher = await cluster.start_batcher()
    empty = cluster.create_run()
    starved = cluster.create_run(batch_groups=2)
    full = cluster.create_run(batch_groups=1, max_staleness=0, max_planned_ahead=0)
    closed = cluster.create_run()
    await cluster.publish(starved, pair("g0"))
    await cluster.publish(full, pair("g0"))
    await cluster.publish(closed, pair("g0"))
    close_run(cluster.client, closed)
    await cluster.planned(full, 1)
    await cluster.planned(closed, 1)
    await cluster.trainer(batcher, full).start()
    cluster.open_group(starved, "open", "open/0/0", num_samples=1)
    cluster.end_leases(starved, "open/0/0")
    runs = (empty, starved, full, closed)

    async def differing() -> dict[str, Any]:
        found = await scrape()
        shown = {
            run: {str(each.kind) for each in reasons(read_snapshot(cluster.client, run))}
            for run in runs
        }
        return {
            run: (kinds(found, run), shown[run]) for run in runs if kinds(found, run) != shown[run]
        }

    async def are_equal() -> bool:
        return not await differing()

    await testkit.wait_until_async(are_equal, describe="the same kinds")
    found = await scrape()
    assert "generator_gone" in kinds(found, starved)
    assert "trainer_not_stepped" in kinds(found, full)


async def test_staleness_is_the_age_of_the_oldest_token(cluster: Cluster) -> None:
    run, trainer = await cluster.started(batch_groups=1)
    turn = testkit.turn("ab", "CD", version=3)
    await cluster.publish(run, testkit.group("g", testkit.trajectory(turn, reward=1.0)))
    await cluster.planned(run, 1)
    before = await scrape()
    await trainer.announce_version(5, step=0)

    assert run not in {name for (name,) in before.get(f"{PREFIX}staleness_versions", {})}
    assert (await scrape()).value(f"{PREFIX}staleness_versions", run) == 2


async def test_a_read_has_a_limited_number_of_runs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_metrics, "MAX_RUNS", 3)
    for _ in range(5):
        cluster.create_run()
    await cluster.start_batcher()

    found = await scrape()

    assert len(found[f"{PREFIX}accepted_trajectories"]) == 3
    assert found.value(f"{PREFIX}left_out_runs") == 2


async def test_a_read_is_kept_for_some_seconds(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.started(batch_groups=1)
    monkeypatch.setattr(run_metrics, "FRESH_S", 60.0)
    read, num_reads = run_metrics.run_commands, 0

    def counted(*arguments: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        return read(*arguments)

    monkeypatch.setattr(run_metrics, "run_commands", counted)
    for _ in range(6):
        assert (await scrape()).value(f"{PREFIX}store_up") == 1

    assert num_reads == 1


async def test_a_store_that_is_away_leaves_the_other_metrics(
    server: EmbeddedServer, cluster: Cluster
) -> None:
    await cluster.started(batch_groups=1)
    assert (await scrape()).value(f"{PREFIX}store_up") == 1
    server.kill()

    found = await scrape()

    assert found.value(f"{PREFIX}store_up") == 0
    assert f"{PREFIX}accepted_trajectories" not in found
    assert "process_cpu_seconds_total" in found
    server.restart()
