"""Forks during which somebody else takes, or frees, the name of the new run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import config
from testkit.scripts import script
from turnstream.errors import ConflictError
from turnstream.store.client import keys
from turnstream.store.run.runs import create_run
from turnstream_server.bus.admin.forks import fork_run

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
    hashes = (names.frontier, names.config, names.counts, names.snapshot, names.clock)
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
