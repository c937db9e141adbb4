"""Runs that have, or take, the same name, one after the other: the store's side."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import redis

from harness.stored import content_of
from testkit import config, sealed
from testkit.run_driver import RunDriver
from testkit.scripts import script
from turnstream.errors import (
    ConflictError,
    FencedError,
    InvalidConfigError,
    RunNotFoundError,
    StoreBehindError,
)
from turnstream.generator import Prompt, add_prompts
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.run_ids import find_run
from turnstream.store.run.configs import read_config
from turnstream.store.run.leases import heartbeat_command, take_over_command
from turnstream.store.run.rewards import reward_command
from turnstream.store.run.runs import close_command, close_run, create_run, list_runs
from turnstream.store.run.tasks import next_task_command, read_prompt_counts
from turnstream.types import RecoveryToken, TrajectoryKey
from turnstream.types.names import RunId
from turnstream_server.bus.admin.deletion import delete_run, deleting_since_ms
from turnstream_server.bus.admin.forks import fork_run
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.bus.queries.ledger import read_ledger
from turnstream_server.bus.sessions.sessions import start_session
from turnstream_server.embedded import EmbeddedServer

PLACES = ("delete.after_begin", "delete.after_slice", "delete.after_payload")
NUM_MANY = 200
"""Trajectories of several slices."""

_names = (f"maze {number}" for number in itertools.count(1))


@pytest.fixture
def name(client: redis.Redis) -> str:
    """The name of a run that is in the store."""
    name = next(_names)
    create_run(client, name, config(2))
    return name


def content(client: redis.Redis, run: str) -> dict[str, Any]:
    """Everything that the store has of one run."""
    found: Any = client.scan_iter(match=f"ts:{{{keys.encode_name(RunId(run).name)}*", count=1000)
    own = [key.decode() for key in found if keys.run_of(key.decode()) == run]
    return {key: content_of(client, key) for key in own}


def kill_deletion(server: EmbeddedServer, name: str, place: str) -> int:
    """The exit status of a command `delete` that is killed at a failpoint."""
    command = [sys.executable, "-m", "turnstream_server.cli", "run", "delete", name, "--yes"]
    environment = {"TURNSTREAM_FAILPOINT": place, "TURNSTREAM_REDIS_URL": server.url}
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


class Overtaken(redis.Redis):
    """A client of the same store; another process acts just before its first call of a script."""

    def __init__(self, client: redis.Redis, name: str, act: Callable[[], object]) -> None:
        super().__init__(connection_pool=client.connection_pool)
        self._sha = script(name).sha
        self._acts = [act]

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send one command."""
        if self._sha in args and self._acts:
            self._acts.pop()()
        return super().execute_command(*args, **options)


def test_deleted_name_can_be_used_again_at_once(client: redis.Redis, name: str) -> None:
    # The name of a deleted run was blocked for 960 s, or 15 leases where that is longer: create_run
    # raised ConflictError until then.
    RunDriver(client, name).fill()
    delete_run(client, name)

    revision = create_run(client, name, config(7))
    again = create_run(client, name, config(7))

    assert (revision, again) == (1, 1)
    assert find_run(client, name) == f"{name}~2"
    assert read_config(client, f"{name}~2")[1] == config(7)
    assert read_ledger(client, f"{name}~2").accepted == 0
    assert [run for run in list_runs(client) if run.name == name] == [f"{name}~2"]
    with pytest.raises(ConflictError, match="another config"):
        create_run(client, name, config(2))


def test_number_of_a_name_stays_when_its_tombstones_have_expired(
    client: redis.Redis, name: str
) -> None:
    RunDriver(client, name).fill()
    delete_run(client, name)
    for key in content(client, name):
        if key != keys.incarnation_key(name):
            client.delete(key)

    create_run(client, name, config())

    assert find_run(client, name) == f"{name}~2"
    assert int(client.pttl(keys.incarnation_key(name))) == -1
    assert not client.exists(keys.run_keys(name).config)


def test_functions_that_take_a_name_work_on_its_newest_run(client: redis.Redis, name: str) -> None:
    delete_run(client, name)
    create_run(client, name, config(2))
    newest = f"{name}~2"

    add_prompts(client, name, [Prompt(prompt_uid="p", payload=b"", num_samples=1)])
    close_run(client, name)

    assert read_prompt_counts(client, name).num_added == 1
    assert read_prompt_counts(client, newest).num_added == 1
    assert read_frontier(client, newest).is_closed


def test_late_writers_of_a_deleted_run_leave_the_next_one_untouched(
    client: redis.Redis, name: str
) -> None:
    # Both runs have an open trajectory of the same name, epoch and writer: only the id of the run
    # tells the late writer of the first from the writer of the second.
    RunDriver(client, name).fill()
    old, new = find_run(client, name), RunId(f"{name}~2")
    delete_run(client, name)
    create_run(client, name, config(2))
    RunDriver(client, new).fill()
    before = content(client, new)

    trajectory_id, key = "g/0/0", TrajectoryKey("g", 0)
    names = keys.run_keys(old)
    late = RunDriver(client, old)
    replies = late.do_all(
        [
            late.append(b"turn1", lease="1", first=1),
            late.append(b"turn1", lease="1/w", first=1),
            late.post_sealed(trajectory_id, 1, encode_event(sealed())),
            late.abandon(trajectory_id),
            late.open_samples("h"),
            reward_command(old, key, 1.0, None),
            heartbeat_command(old, [(trajectory_id, 1)]),
            take_over_command(old, trajectory_id, writer="x"),
            next_task_command(old),
            close_command(old, ""),
        ],
    )

    texts = [str(reply) for reply in replies]
    kinds = {type(reply) for reply in replies if isinstance(reply, Exception)}
    assert kinds == {FencedError, RunNotFoundError}
    assert all("FENCED" in text or "deleted" in text for text in texts if "never" not in text)
    assert "its run was deleted" in texts[0]
    assert content(client, new) == before
    assert content(client, old).keys() == {
        *(names.deleted, names.wake, keys.trajectory_keys(old, trajectory_id).meta),
        keys.incarnation_key(old),
    }


@pytest.mark.parametrize("place", PLACES)
def test_killed_deletion_is_finished_after_the_name_was_used_again(
    client: redis.Redis, server: EmbeddedServer, name: str, place: str
) -> None:
    RunDriver(client, name).fill(num_samples=NUM_MANY)
    killed = kill_deletion(server, name, place)

    create_run(client, name, config(7))
    RunDriver(client, f"{name}~2").fill()
    listed = [run for run in list_runs(client) if run.name == name]
    since_ms = deleting_since_ms(client, name)
    other_since_ms = deleting_since_ms(client, f"{name}~2")
    done = delete_run(client, name)
    num_left = client.hlen(keys.run_keys(f"{name}~2").ledger)
    other = delete_run(client, name)

    assert killed == -9
    assert num_left > 0  # whoever repeats a deletion does not mean the run that came after it
    assert listed == [name, f"{name}~2"]
    assert (since_ms is not None, other_since_ms) == (True, None)
    assert (done.runs, other.runs) == ((name,), (f"{name}~2",))
    assert not [run for run in list_runs(client) if run.name == name]
    assert not client.exists(keys.run_keys(name).doomed, keys.run_keys(f"{name}~2").doomed)
    for run in (*done.runs, *other.runs):
        left = {key: int(client.pttl(key)) for key in content(client, run)}
        assert {key for key, ms in left.items() if ms == -1} <= {keys.incarnation_key(name)}
    create_run(client, name, config())
    assert find_run(client, name) == f"{name}~3"


def test_finishing_an_old_deletion_spares_a_run_with_its_id(
    client: redis.Redis, server: EmbeddedServer, name: str
) -> None:
    RunDriver(client, name).fill(num_samples=NUM_MANY)
    kill_deletion(server, name, "delete.after_begin")
    create_run(client, name, config())
    RunDriver(client, f"{name}~2").fill()
    before = content(client, f"{name}~2")

    done = delete_run(client, RunId(name))

    assert (done.runs, done.num_trajectories) == ((name,), NUM_MANY)
    assert content(client, f"{name}~2") == before


def test_run_created_while_its_name_moves_on_is_the_newest(client: redis.Redis, name: str) -> None:
    delete_run(client, name)

    def use_up() -> None:
        create_run(client, name, config(5))
        delete_run(client, name)

    later = Overtaken(client, "create_run", use_up)
    create_run(later, name, config(7))

    assert find_run(client, name) == f"{name}~3"
    assert read_config(client, f"{name}~3")[1] == config(7)
    assert not client.exists(keys.run_keys(f"{name}~2").config)


@pytest.mark.parametrize("name", ["a~2", "a b~1", "~007"])
def test_name_that_ends_like_an_id_is_refused_for_a_new_run(
    client: redis.Redis, name: str, new_run: Callable[..., str]
) -> None:
    origin = new_run(client)
    token = RecoveryToken(lineage="main", step=0, chain_hash="")

    with pytest.raises(InvalidConfigError, match="ends in '~' and digits"):
        create_run(client, name, config())
    with pytest.raises(InvalidConfigError, match="ends in '~' and digits"):
        fork_run(client, origin, name, token)

    assert name not in list_runs(client)
    assert not client.exists(keys.run_keys(name).config)


async def test_fork_of_a_deleted_origin_is_distinct_from_the_next_run(
    client: redis.Redis, run: Any
) -> None:
    await run.plan_steps(2)
    await run.commit(await run.start("s"), 1, 2)
    fork = next(_names)
    made = fork_run(client, run.name, fork, run.token(2))
    delete_run(client, run.name)
    create_run(client, run.name, config())

    again = fork_run(client, run.name, fork, run.token(2))

    assert again == made
    with pytest.raises(StoreBehindError):
        fork_run(client, run.name, next(_names), run.token(2))


async def test_token_of_a_deleted_run_begins_no_session_of_the_next(
    client: redis.Redis, async_client: Any, run: Any
) -> None:
    await run.plan_steps(1)
    await run.commit(await run.start("s"), 1)
    token = run.token(1)
    delete_run(client, run.name)
    create_run(client, run.name, config())
    before = content(client, f"{run.name}~2")

    with pytest.raises(StoreBehindError):
        await start_session(
            async_client, f"{run.name}~2", session="t", dp_world_size=1, token=token
        )

    assert content(client, f"{run.name}~2") == before


@pytest.fixture
async def origin(run: Any) -> Any:
    """A run of two steps, both of them committed."""
    await run.plan_steps(2)
    await run.commit(await run.start("s"), 1, 2)
    return run


def without_payload(client: redis.Redis, run: str) -> list[Any]:
    """Return the state of a run, except the payload, which a fork lacks."""
    names = keys.run_keys(run)
    hashes = (names.frontier, names.config, names.counts, names.snapshot, names.clock)
    return [client.hgetall(name) for name in hashes]


def test_two_equal_forks_at_once_both_succeed(client: redis.Redis, origin: Any) -> None:
    made: list[Any] = []

    def make() -> None:
        made.append(fork_run(client, origin.name, "one fork", origin.token(2)))
        made.append(without_payload(client, "one fork"))

    later = Overtaken(client, "fork_run", make)
    again = fork_run(later, origin.name, "one fork", origin.token(2))

    assert [again, without_payload(client, "one fork")] == made


@pytest.mark.parametrize("other", ["fork", "run"])
def test_name_taken_in_between_stays_with_its_new_owner(
    client: redis.Redis, origin: Any, other: str
) -> None:
    name, taken = f"a taken {other}", []

    def take() -> None:
        if other == "fork":
            fork_run(client, origin.name, name, origin.token(1))
        else:
            create_run(client, name, config(7))
        taken.extend(without_payload(client, name))

    later = Overtaken(client, "fork_run", take)
    with pytest.raises(ConflictError, match="was not forked from there"):
        fork_run(later, origin.name, name, origin.token(2))

    assert without_payload(client, name) == taken
