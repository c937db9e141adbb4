"""Runs that have, or take, the same name, one after the other: the store's side."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import redis

from harness.stored import content_of
from testkit import config, sealed
from testkit.runs.run_driver import RunDriver
from testkit.runs.scripts import script
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
from turnstream.store.run.groups import adopt_command, heartbeat_command
from turnstream.store.run.rewards import encode_reward, post_reward_command
from turnstream.store.run.runs import close_command, close_run, create_run, list_runs
from turnstream.store.run.tasks import next_task_command, read_prompt_counts
from turnstream.types import RecoveryToken, TrajectoryKey
from turnstream.types.names import RunId
from turnstream_server.ledger.admin.deletion import delete_run
from turnstream_server.ledger.admin.forks import fork_run
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.queries.ledger import read_ledger
from turnstream_server.ledger.sessions.sessions import start_session

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
            post_reward_command(old, *encode_reward(key, 1.0, None)),
            heartbeat_command(old, [(trajectory_id, 1)], writer="w"),
            adopt_command(old, trajectory_id, writer="x"),
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


async def test_fork_of_a_deleted_origin_is_distinct_from_the_next_run(run: Any) -> None:
    await run.plan_steps(2)
    await run.commit(await run.start("s"), 1, 2)
    fork = next(_names)
    made = fork_run(run.store, run.name, fork, run.token(2))
    delete_run(run.store, run.name)
    create_run(run.store, run.name, config())

    again = fork_run(run.store, run.name, fork, run.token(2))

    assert again == made
    with pytest.raises(StoreBehindError):
        fork_run(run.store, run.name, next(_names), run.token(2))


async def test_token_of_a_deleted_run_begins_no_session_of_the_next(
    async_client: Any, run: Any
) -> None:
    await run.plan_steps(1)
    await run.commit(await run.start("s"), 1)
    token = run.token(1)
    delete_run(run.store, run.name)
    create_run(run.store, run.name, config())
    before = content(run.store, f"{run.name}~2")

    with pytest.raises(StoreBehindError):
        await start_session(
            async_client, f"{run.name}~2", session="t", dp_world_size=1, token=token
        )

    assert content(run.store, f"{run.name}~2") == before


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


def test_two_equal_forks_at_once_both_succeed(origin: Any) -> None:
    made: list[Any] = []

    def make() -> None:
        made.append(fork_run(origin.store, origin.name, "one fork", origin.token(2)))
        made.append(without_payload(origin.store, "one fork"))

    later = Overtaken(origin.store, "fork_run", make)
    again = fork_run(later, origin.name, "one fork", origin.token(2))

    assert [again, without_payload(origin.store, "one fork")] == made


@pytest.mark.parametrize("other", ["fork", "run"])
def test_name_taken_in_between_stays_with_its_new_owner(origin: Any, other: str) -> None:
    name, taken = f"a taken {other}", []

    def take() -> None:
        if other == "fork":
            fork_run(origin.store, origin.name, name, origin.token(1))
        else:
            create_run(origin.store, name, config(7))
        taken.extend(without_payload(origin.store, name))

    later = Overtaken(origin.store, "fork_run", take)
    with pytest.raises(ConflictError, match="was not forked from there"):
        fork_run(later, origin.name, name, origin.token(2))

    assert without_payload(origin.store, name) == taken
