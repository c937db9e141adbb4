from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from testkit.scripts import script
from turnstream.store.client import keys
from turnstream.store.client.scripts import run_command

pytestmark = pytest.mark.redis

_NOTE = script("note_conflict")


def test_repeated_conflict_is_counted_once(
    client: redis.Redis, new_run: Callable[..., str]
) -> None:
    where = (keys.run_keys(new_run(client)).conflicts,)

    counted = [
        run_command(client, _NOTE(where, name, "turn 0 has another content", token))
        for name, token in (("g/0/0", "a:1"), ("g/0/0", "a:1"), ("g/1/0", "a:2"))
    ]

    assert counted == [1, 0, 1]
    assert client.hmget(where[0], "num", "last") == [b"2", b"g/1/0: turn 0 has another content"]
