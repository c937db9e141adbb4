from __future__ import annotations

import pytest

from turnstream.store.client.server_checks import SYNCS_OF, unsafe_server


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


def test_fsync_refuses_everysec_and_hidden_settings() -> None:
    for facts in ({"appendfsync": "everysec"}, {}):
        error = unsafe_server(facts, where="the store", syncs=SYNCS_OF["fsync"])
        assert error is not None
        assert "needed is 'always'" in error.message
