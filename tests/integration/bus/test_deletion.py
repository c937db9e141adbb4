import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from harness.stored import content_of
from testkit import config
from testkit.run_driver import RunDriver
from testkit.stored_keys import declared_type
from turnstream.errors import FencedError, RunNotFoundError
from turnstream.store.client import keys
from turnstream.store.run.configs import read_config, revise_config
from turnstream.store.run.leases import list_lapsed
from turnstream.store.run.runs import (
    close_run,
    create_run,
    list_runs,
    pause_run,
    reopen_run,
    resume_run,
)
from turnstream.types import VersionAnnounced
from turnstream.types.names import RunId
from turnstream_server.bus.admin.deletion import delete_run, deleting_since_ms
from turnstream_server.bus.leadership.leadership import Term, acquire_leadership
from turnstream_server.bus.leadership.snapshots import save_snapshot
from turnstream_server.bus.queries.ledger import read_ledger
from turnstream_server.bus.release.release import advance_watermark
from turnstream_server.bus.sessions.observers import declare_observer
from turnstream_server.bus.sessions.sessions import announce_version
from turnstream_server.embedded import EmbeddedServer

PLACES = ("delete.after_begin", "delete.after_slice", "delete.after_payload")
NUM_MANY = 700
"""Trajectories of several slices, and of several pages of a hash."""


def keys_of(client: redis.Redis, run: str) -> dict[str, int]:
    """Every key of a run (by its id) alone, and its time to live in ms; -1: for ever."""
    name = keys.encode_name(RunId(run).name)
    found: Any = [*client.scan_iter(match=f"ts:{{{name}}}*"), *client.scan_iter(f"ts:{{{name}/*")]
    names = [key.decode() for key in found]
    own = [key for key in names if keys.run_of(key) == run and key != keys.incarnation_key(run)]
    return {key: int(client.pttl(key)) for key in own}


def parts(found: dict[str, int]) -> set[str]:
    return {key.rpartition(":")[2] for key in found}


def content(client: redis.Redis, run: str) -> dict[str, Any]:
    return {name: content_of(client, name) for name in keys_of(client, run)}


async def test_every_kind_of_key_goes_and_other_runs_stay_as_they_are(
    client: redis.Redis, async_client: redis.asyncio.Redis, start_run: Callable[..., Any]
) -> None:
    driver = await start_run(async_client)
    run = driver.name
    await driver.plan_steps(1)
    RunDriver(client, run).fill(num_samples=2)
    session = await driver.start("s")
    await driver.commit(session, 1)
    version = VersionAnnounced(version=0, step=1, lineage="main", weights_uri="")
    await announce_version(async_client, run, version, session_epoch=1)
    await declare_observer(async_client, run, observer="o", first_step=None, expiry_s=60)
    await save_snapshot(
        Term(async_client, run, driver.leader_epoch), position="1-0", step=1, record=b""
    )
    names = keys.run_keys(run)
    for part in names._fields:  # whatever else a run may have
        name = getattr(names, part)
        kind = declared_type(name)
        if part not in ("deleted", "doomed") and not client.exists(name):
            client.zadd(name, {"x": 1}) if kind == "zset" else client.hset(name, "x", 1)
    other = f"{run}-other"
    create_run(client, other, config())
    RunDriver(client, other).fill(num_samples=2)
    before = content(client, other)

    done = delete_run(client, run)

    left = keys_of(client, run)
    assert (done.runs, done.num_trajectories) == ((run,), 4)
    assert parts(left) == {"deleted", "wake", "meta"}
    assert all(0 < ms <= 960_000 for ms in left.values()), left
    assert len([name for name in left if name.endswith(":meta")]) == 4
    assert run not in list_runs(client)
    assert content(client, other) == before
    assert other in list_runs(client)
    assert read_ledger(client, other).accepted == 2


async def test_planner_trainer_and_readers_get_run_not_found(
    client: redis.Redis, async_client: redis.asyncio.Redis, start_run: Callable[..., Any]
) -> None:
    driver = await start_run(async_client)
    await driver.plan_steps(2)
    session = await driver.start("s")
    delete_run(client, driver.name)
    before = keys_of(client, driver.name)

    with pytest.raises(RunNotFoundError):
        await driver.step(session, 1)
    with pytest.raises(RunNotFoundError):
        await driver.start("another")
    with pytest.raises(RunNotFoundError):
        await acquire_leadership(async_client, driver.name, owner="q", lease_s=1)
    with pytest.raises(RunNotFoundError):
        await declare_observer(async_client, driver.name, observer="o", first_step=1, expiry_s=60)
    with pytest.raises(FencedError):
        await advance_watermark(Term(async_client, driver.name, driver.leader_epoch))
    with pytest.raises(RunNotFoundError):
        list_lapsed(client, driver.name)
    with pytest.raises(RunNotFoundError):
        close_run(client, driver.name)
    with pytest.raises(RunNotFoundError):
        read_config(client, driver.name)
    for change in (pause_run, resume_run, reopen_run):
        with pytest.raises(RunNotFoundError):
            change(client, driver.name)
    with pytest.raises(RunNotFoundError):
        revise_config(client, driver.name, config(), from_step=9)
    assert keys_of(client, driver.name).keys() == before.keys()


@pytest.mark.parametrize("place", PLACES)
def test_a_deletion_that_is_killed_anywhere_is_finished_by_the_next(
    client: redis.Redis, server: EmbeddedServer, new_run: Callable[..., str], place: str
) -> None:
    run = new_run(client)
    RunDriver(client, run).fill(num_samples=NUM_MANY)
    command = [sys.executable, "-m", "turnstream_server.cli", "run", "delete", run, "--yes"]
    environment = {"TURNSTREAM_FAILPOINT": place, "TURNSTREAM_REDIS_URL": server.url}

    killed = subprocess.run(command, env=environment, capture_output=True, check=False)
    names = keys.run_keys(run)
    num_payloads = len([name for name in keys_of(client, run) if name.endswith(":turns")])
    is_listed, since_ms = run in list_runs(client), deleting_since_ms(client, run)
    done = delete_run(client, run)

    assert killed.returncode == -9, killed.stderr
    assert is_listed
    assert since_ms is not None
    assert (num_payloads == NUM_MANY, num_payloads == 0) == {
        "delete.after_begin": (True, False),
        "delete.after_slice": (False, False),
        "delete.after_payload": (False, True),
    }[place]
    assert (done.runs, done.num_trajectories) == ((run,), num_payloads)
    assert parts(keys_of(client, run)) == {"deleted", "wake", "meta"}
    assert -1 not in keys_of(client, run).values()
    assert not client.exists(names.doomed)
    assert deleting_since_ms(client, run) is None
    assert run not in list_runs(client)


def test_tombstones_of_a_deleted_run_outlast_fifteen_of_its_leases(
    client: redis.Redis, new_run: Callable[..., str]
) -> None:
    run = new_run(client, lease_s=100.0)
    RunDriver(client, run).fill(num_samples=2)

    delete_run(client, run)

    lives_ms = {name.rpartition(":")[2]: ms for name, ms in keys_of(client, run).items()}
    assert 1_400_000 < lives_ms["meta"] <= 1_500_000
    assert lives_ms["meta"] < lives_ms["deleted"] <= 1_560_000
    with pytest.raises(RunNotFoundError):
        delete_run(client, run)


def test_missing_run_cannot_be_deleted(client: redis.Redis) -> None:
    with pytest.raises(RunNotFoundError):
        delete_run(client, "nobody")

    assert keys_of(client, "nobody") == {}
