"""Forks during which somebody else takes, or frees, the name of the new run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import config
from testkit.scripts import script
from turnstream.errors import ConflictError, RunNotFoundError
from turnstream.store.client import keys
from turnstream.store.run.runs import create_run
from turnstream_server.bus.admin.deletion import delete_run
from turnstream_server.bus.admin.forks import fork_run
from turnstream_server.bus.core.frontier import read_frontier

pytestmark = pytest.mark.redis


@pytest.fixture
async def origin(run: Any) -> Any:
    """A run of two steps, both of them committed."""
    await run.plan_steps(2)
    await run.commit(await run.start("s"), 1, 2)
    return run


class Overtaken(redis.Redis):
    """A client of the same store; somebody acts just before its first call of a script."""

    def __init__(self, client: redis.Redis, name: str, act: Callable[[], object]) -> None:
        super().__init__(connection_pool=client.connection_pool)
        self._sha = script(name).sha
        self._acts = [act]

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send one command."""
        if self._sha in args and self._acts:
            self._acts.pop()()
        return super().execute_command(*args, **options)


def content(client: redis.Redis, run: str) -> list[Any]:
    """Return the state of a run without its payload, which a fork does not have."""
    names = keys.run_keys(run)
    hashes = (names.frontier, names.config, names.counts, names.snapshot, names.past, names.clock)
    return [client.hgetall(name) for name in hashes]


def test_two_equal_forks_at_once_both_succeed(client: redis.Redis, origin: Any) -> None:
    made: list[Any] = []

    def make() -> None:
        made.append(fork_run(client, origin.name, "one fork", origin.token(2)))
        made.append(content(client, "one fork"))

    later = Overtaken(client, "fork_run", make)
    again = fork_run(later, origin.name, "one fork", origin.token(2))

    assert [again, content(client, "one fork")] == made


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
        taken.extend(content(client, name))

    later = Overtaken(client, "fork_run", take)
    with pytest.raises(ConflictError, match="was not forked from there"):
        fork_run(later, origin.name, name, origin.token(2))

    assert content(client, name) == taken


def test_late_records_restore_nothing_that_moved_to_a_file(
    client: redis.Redis, origin: Any
) -> None:
    names, before = keys.run_keys("a fork with files"), []

    def make_and_move() -> None:
        fork_run(client, origin.name, "a fork with files", origin.token(2))
        client.delete(names.past)
        client.hset(names.frontier, "cold", 2)
        before.extend(content(client, "a fork with files"))

    later = Overtaken(client, "inherit_records", make_and_move)
    fork_run(later, origin.name, "a fork with files", origin.token(2))

    assert content(client, "a fork with files") == before


def test_a_fork_that_is_deleted_while_it_is_made_inherits_nothing(
    client: redis.Redis, origin: Any
) -> None:
    later = Overtaken(client, "inherit_records", lambda: delete_run(client, "gone"))

    with pytest.raises(RunNotFoundError, match="'gone'"):
        fork_run(later, origin.name, "gone", origin.token(2))

    assert content(client, "gone") == [{}] * 6


def test_records_of_an_origin_come_into_no_other_fork_of_the_name(
    client: redis.Redis, origin: Any
) -> None:
    def make_another() -> None:
        delete_run(client, "remade")
        fork_run(client, origin.name, "remade", origin.token(1))

    later = Overtaken(client, "inherit_records", make_another)
    with pytest.raises(RunNotFoundError):
        fork_run(later, origin.name, "remade", origin.token(2))

    assert not client.exists(keys.run_keys("remade").past)
    assert client.hkeys(keys.run_keys("remade~2").past) == [b"1"]
    assert read_frontier(client, "remade~2").planned == 1
