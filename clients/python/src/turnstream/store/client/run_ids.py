"""The run that has a name now: each process reads its id once, and works with the id.

After the deletion of a run, another run may have its name. The id is never used again, so a process
that keeps it gets RunNotFoundError or FencedError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis
import redis.asyncio

from turnstream.errors import InvalidConfigError, RunNotFoundError
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.types.names import RunId, checked_run_name, is_run_id


def find_run(client: redis.Redis, run: str) -> RunId:
    """Return the id of the run that has this name now; an id is returned as it is."""
    if is_run_id(run):
        return RunId(run)
    with translating():
        found: Any = client.get(keys.incarnation_key(run))
    return parse_incarnation(run, found)


async def find_run_async(client: redis.asyncio.Redis, run: str) -> RunId:
    """The same as `find_run`, for asyncio."""
    if is_run_id(run):
        return RunId(run)
    with translating():
        found: Any = await client.get(keys.incarnation_key(run))
    return parse_incarnation(run, found)


def parse_incarnation(name: str, found: bytes | None) -> RunId:
    """Return the id of a value of the key `incarnation`; None: there is no such key."""
    return RunId.of(name, int(found or 1))


def listed_run(member: bytes) -> RunId | None:
    r"""Return the run that a member of the key `runs` names; None if it is no name of a run.

    >>> listed_run(b"a%2Fb"), listed_run(b"maze~2"), listed_run(b"\xff"), listed_run(b"a b")
    ('a/b', 'maze~2', None, None)
    """
    try:
        run = RunId(keys.decode_name(member.decode()))
        return run if keys.encode_run(run).encode() == member else None
    except (UnicodeDecodeError, InvalidConfigError):
        return None


def create_under(
    client: redis.Redis, name: str, create: Callable[[RunId], int]
) -> tuple[RunId, int]:
    """Create the next run of a name; return its id and the reply of the script.

    `create` is repeated if another process used up the number.
    """
    run = find_run(client, checked_run_name(name))
    while (reply := create(run)) < 0:
        run = RunId.of(run.name, -reply)
    return run, reply


def no_such_run(run: str) -> RunNotFoundError:
    """Return the error for a run that is not in the store.

    >>> str(no_such_run("maze~2"))
    "no run named 'maze' with the id 'maze~2': it was deleted, or not created yet"
    """
    name = RunId(run).name
    which = f"{name!r}" if name == run else f"{name!r} with the id {str(run)!r}"
    return RunNotFoundError(f"no run named {which}: it was deleted, or not created yet")
