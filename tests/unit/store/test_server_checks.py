from __future__ import annotations

from types import SimpleNamespace

import pytest
from redis.exceptions import BusyLoadingError

from turnstream.errors import UnsafeStoreError
from turnstream.store.client import server_checks
from turnstream.store.client.server_checks import SYNCS, SYNCS_OF, unsafe_server


@pytest.mark.parametrize(
    "facts",
    [
        {"redis_version": "7.0.15"},
        {"redis_version": "8.6"},
        # Valkey reports the Redis that it is compatible with, too.
        {"redis_version": "7.2.4", "valkey_version": "8.0.0"},
        {"redis_version": "7.2.4", "valkey_version": "9.1.2"},
        {"aof_enabled": "1", "maxmemory_policy": "noeviction", "appendfsync": "always"},
        {},
    ],
)
def test_safe_server_is_accepted(facts: dict[str, str]) -> None:
    assert unsafe_server(facts, where="the store") is None


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"redis_version": "6.2.14"}, "redis_version: the store has 6.2.14; needed is Redis 7"),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.6"}, "valkey_version: .* has 7.2.6"),
        ({"redis_version": "unstable"}, "has unstable; needed is Redis 7 or Valkey 8"),
        ({"aof_enabled": "0"}, "appendonly: the store has 'no'; needed is 'yes'"),
        ({"maxmemory_policy": "allkeys-lru"}, "maxmemory-policy: .* needed is 'noeviction'"),
        ({"appendfsync": "no"}, "appendfsync: .* has 'no'; needed is 'everysec'"),
        ({"no-appendfsync-on-rewrite": "yes"}, "no-appendfsync-on-rewrite: .* needed is 'no'"),
    ],
)
def test_unsafe_server_is_refused_with_value_and_need(facts: dict[str, str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        raise unsafe_server(facts, where="the store") or AssertionError("accepted")


@pytest.mark.parametrize(("loading", "error"), [("1", BusyLoadingError), ("0", UnsafeStoreError)])
def test_server_that_loads_its_file_is_not_refused(loading: str, error: type[Exception]) -> None:
    # While it reads the file, a server says that it has none.
    info = f"loading:{loading}\r\naof_enabled:0\r\n".encode()
    connection = SimpleNamespace(host="s", port=6379)

    with pytest.raises(Exception, match="the store at s:6379") as caught:
        server_checks._check([info, []], connection=connection, syncs=SYNCS)  # pyright: ignore[reportPrivateUsage]

    assert error in {type(caught.value), type(getattr(caught.value, "error", None))}


def test_fsync_refuses_everysec_and_hidden_settings() -> None:
    for facts in ({"appendfsync": "everysec"}, {}):
        error = unsafe_server(facts, where="the store", syncs=SYNCS_OF["fsync"])
        assert error is not None
        assert "needed is 'always'" in error.message
