import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from harness.stored import content_of
from testkit import config
from testkit.runs.run_driver import RunDriver
from testkit.runs.stored_keys import declared_type
from turnstream.errors import FencedError, RunNotFoundError
from turnstream.store.client import keys
from turnstream.store.client.scripts import run_command
from turnstream.store.run.configs import read_config, revise_config
from turnstream.store.run.groups import list_lapsed_command
from turnstream.store.run.runs import (
    close_run,
    create_run,
    list_runs,
    pause_run,
    reopen_run,
    resume_run,
)
from turnstream.types.names import RunId
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.admin.deletion import delete_run, deleting_since_ms
from turnstream_server.ledger.leadership.writes import acquire_leadership
from turnstream_server.ledger.queries.ledger import read_ledger
from turnstream_server.ledger.sessions.observers import declare_observer

NUM_MANY = 600
"""Trajectories of several slices, and of several pages of a hash."""


WRITES = {
    "hash": ("HSET", "x", 1),
    "set": ("SADD", "x"),
    "stream": ("XADD", "*", "x", 1),
    "zset": ("ZADD", 1, "x"),
}


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


async def test_every_kind_of_key_goes_and_other_runs_stay_as_they_are(run: Any) -> None:
    client, name = run.store, run.name
    await run.plan_steps(1)
    RunDriver(client, name).fill(num_samples=2)
    await run.commit(await run.start("s"), 1)
    for part, key in run.keys._asdict().items():
        if part not in ("deleted", "deleting") and not client.exists(key):
            command, *words = WRITES[declared_type(key) or ""]
            client.execute_command(command, key, *words)
    other = f"{name}-other"
    create_run(client, other, config())
    RunDriver(client, other).fill(num_samples=2)
    before = content(client, other)

    done = delete_run(client, name)

    left = keys_of(client, name)
    assert (done.runs, done.num_trajectories) == ((name,), 4)
    assert parts(left) == {"deleted", "wake", "meta"}
    assert all(0 < ms <= 960_000 for ms in left.values()), left
    assert len([key for key in left if key.endswith(":meta")]) == 4
    assert name not in list_runs(client)
    assert content(client, other) == before
    assert other in list_runs(client)
    assert read_ledger(client, other).accepted == 2


@pytest.mark.both_servers
async def test_planner_trainer_and_readers_get_run_not_found(run: Any) -> None:
    client, name = run.store, run.name
    await run.plan_steps(2)
    session = await run.start("s")
    delete_run(client, name)
    before = keys_of(client, name)

    calls: list[Callable[[], Any]] = [
        lambda: run.step(session, 1),
        lambda: run.start("another"),
        lambda: acquire_leadership(run.client, name, owner="q", lease_s=1),
        lambda: declare_observer(run.client, name, observer="o", first_step=1, expiry_s=60),
    ]
    for call in calls:
        with pytest.raises(RunNotFoundError):
            await call()
    for read in (close_run, read_config, pause_run, resume_run, reopen_run):
        with pytest.raises(RunNotFoundError):
            read(client, name)
    with pytest.raises(RunNotFoundError):
        run_command(client, list_lapsed_command(name))
    with pytest.raises(RunNotFoundError):
        revise_config(client, name, config(), from_step=9)
    with pytest.raises(FencedError):
        await run.advance_watermark()
    assert keys_of(client, name).keys() == before.keys()


@pytest.mark.parametrize(
    ("place", "next_call"),
    [
        ("delete.after_begin", "same"),
        pytest.param("delete.after_slice", "same", marks=pytest.mark.campaign),
        ("delete.after_payload", "same"),
        ("delete.after_slice", "after reuse"),
        pytest.param("delete.after_begin", "after reuse, by id", marks=pytest.mark.campaign),
    ],
)
def test_killed_deletion_is_finished_by_the_next_call(
    client: redis.Redis,
    server: EmbeddedServer,
    new_run: Callable[..., str],
    place: str,
    next_call: str,
) -> None:
    run = new_run(client)
    RunDriver(client, run).fill(num_samples=NUM_MANY)
    command = [sys.executable, "-m", "turnstream_server.cli", "run", "delete", run, "--yes"]
    environment = {"TURNSTREAM_FAILPOINT": place, "TURNSTREAM_REDIS_URL": server.url}
    killed = subprocess.run(command, env=environment, capture_output=True, check=False)
    if next_call != "same":
        create_run(client, run, config(7))
        RunDriver(client, f"{run}~2").fill()
    next_run = content(client, f"{run}~2")

    num_payloads = len([name for name in keys_of(client, run) if name.endswith(":turns")])
    is_listed, since_ms = run in list_runs(client), deleting_since_ms(client, run)
    done = delete_run(client, RunId(run) if "by id" in next_call else run)

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
    assert deleting_since_ms(client, run) is None
    assert run not in list_runs(client)
    assert content(client, f"{run}~2") == next_run


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
