"""Stored keys, and checks of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from testkit import wait_until_async
from testkit.services import servers
from turnstream.errors import (
    BatchingError,
    ConflictError,
    RunNotFoundError,
    StoreUnavailableError,
    UnknownKeyError,
)
from turnstream.store.client.connection import connect, connect_async
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.keys import records
from turnstream_server.keys.records import ROLES, KeyChecks, KeyLimits, key_id_of
from turnstream_server.keys.store import (
    KEYS,
    add_service_key,
    create_key,
    list_keys,
    revoke_key,
)

pytestmark = pytest.mark.redis

own_server = servers.own_server_of_each_kind


@pytest.fixture(autouse=True)
def no_other_keys(own_client: redis.Redis) -> Iterator[None]:
    yield
    own_client.delete(KEYS)


@pytest.mark.parametrize("record", [b"", b"{", b"7", b"[]", b"null", b"\xff", b'{"name": "ci"'])
def test_damaged_record_leaves_the_other_keys(own_client: redis.Redis, record: bytes) -> None:
    create_key(own_client, "before", roles=["read"])
    own_client.hset(KEYS, mapping={b"\xff0123456789": record, "0123456789": record})
    create_key(own_client, "after", roles=["read"])

    found = {key.name: key.roles for key in list_keys(own_client)}
    names = {"damaged:01234567", r"damaged:\xff0123"}
    assert found == {"before": {"read"}, "after": {"read"}} | dict.fromkeys(names, frozenset())

    for name in (*names, "before"):
        revoke_key(own_client, name)
    assert [key.name for key in list_keys(own_client)] == ["after"]


@pytest.mark.both_servers
def test_key_is_listed_with_all_that_it_may_and_never_stored(own_client: redis.Redis) -> None:
    limits = KeyLimits(10.0, 1e6, 1_000)
    secret = create_key(
        own_client, "ci", roles=["read", "produce"], runs=["a/b"], expires_s=60, limits=limits
    )

    (key,) = list_keys(own_client)

    assert (key.name, key.roles, key.runs, key.limits) == (
        *("ci", {"read", "produce"}, ("a/b",)),
        limits,
    )
    assert key.expires_ms == key.created_ms + 60_000
    assert key.key_id == key_id_of(secret)
    content: Any = own_client.dump(KEYS), own_client.hgetall(KEYS)
    assert secret not in str(content)
    assert secret.removeprefix("tml-") not in str(content)


def test_one_of_many_keys_with_a_name_is_created(
    own_server: EmbeddedServer, own_client: redis.Redis
) -> None:
    def create(_: int) -> str:
        with connect(own_server.url) as client:
            try:
                return create_key(client, "ci", roles=["read"])
            except ConflictError:
                return ""

    with ThreadPoolExecutor(16) as threads:
        secrets = [each for each in threads.map(create, range(64)) if each]

    assert len(secrets) == 1
    assert [key.key_id for key in list_keys(own_client)] == [key_id_of(secrets[0])]


def test_service_key_is_added_once_and_takes_no_rights_of_another(
    own_server: EmbeddedServer, own_client: redis.Redis
) -> None:
    own = create_key(own_client, "own", roles=["read"])

    def add(_: int) -> bool:
        with connect(own_server.url) as client:
            return add_service_key(client, "tml-service")

    with ThreadPoolExecutor(8) as threads:
        added = [*threads.map(add, range(16))]

    assert sum(added) == 1
    assert not add_service_key(own_client, own)
    found = {key.name: key.roles for key in list_keys(own_client)}
    assert found == {"own": {"read"}, "service": set(ROLES)}


WRONG: dict[str, dict[str, Any]] = {
    "roles are": {"roles": ["root"]},
    "roles are \\[\\]": {"roles": []},
    "name is ' '": {"name": " "},
    "name is 'a": {"name": "a\x1b[2J"},
    "expires_s is 0": {"expires_s": 0},
    "requests_per_s is nan": {"limits": KeyLimits(requests_per_s=float("nan"))},
    "max_body_bytes is -1": {"limits": KeyLimits(max_body_bytes=-1)},
    "run: ": {"runs": [""]},
    "run: 'maze~2' ends in": {"runs": ["maze", "maze~2"]},  # the id of a later run of a name
    "run: a name of 600 characters": {"runs": ["a" * 600]},
}


def test_wrong_values_create_no_key(own_client: redis.Redis) -> None:
    for problem, fields in WRONG.items():
        with pytest.raises(BatchingError, match=f"^{problem}"):
            create_key(own_client, **{"name": "ci", "roles": ["read"], **fields})

    assert list_keys(own_client) == []


async def test_checks_follow_the_store_within_seconds(
    own_server: EmbeddedServer, own_client: redis.Redis
) -> None:
    secret = create_key(own_client, "ci", roles=["read"])
    async with connect_async(own_server.url) as client:
        checks = KeyChecks(client, requires_key=True)
        assert (await checks.identify(secret)).name == "ci"

        revoke_key(own_client, "ci")

        await wait_until_async(lambda: refused(checks, secret), timeout_s=5, describe="the end")
    with pytest.raises(RunNotFoundError, match="no key 'ci'"):
        revoke_key(own_client, "ci")
    create_key(own_client, "ci", roles=["admin"])  # the name is free


async def test_store_decides_when_a_key_expires(
    own_server: EmbeddedServer, own_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = create_key(own_client, "soon", roles=["read"], expires_s=0.3)
    later = create_key(own_client, "later", roles=["read"], expires_s=3_600)
    async with connect_async(own_server.url) as client:
        checks = KeyChecks(client, requires_key=True)
        monkeypatch.setattr(time, "time", lambda: 0.0)  # this machine is far behind
        await wait_until_async(lambda: refused(checks, soon), describe="the end of the key")
        monkeypatch.setattr(time, "time", lambda: 2.0**33)  # and far ahead
        assert (await checks.identify(later)).name == "later"


async def test_unknown_keys_leave_known_ones_in_the_cache(
    own_server: EmbeddedServer, own_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_MAX_CACHED", 3)
    monkeypatch.setattr(records, "_FRESH_S", 0.0)
    secrets = [create_key(own_client, f"ci-{number}", roles=["read"]) for number in range(4)]
    async with connect_async(own_server.url, num_retries=0) as client:
        checks = KeyChecks(client, requires_key=True)
        for secret in (*secrets, *(f"tml-{number}" for number in range(9))):
            await refused(checks, secret)
        own_server.kill()

        for secret in secrets[1:]:
            assert (await checks.identify(secret)).key_id == key_id_of(secret)
        assert not checks.is_known(secrets[0])  # the oldest of too many
    own_server.restart()


async def refused(checks: KeyChecks, secret: str) -> bool:
    try:
        await checks.identify(secret)
    except UnknownKeyError:
        return True
    return False


async def test_known_key_is_accepted_while_the_store_is_away(
    own_server: EmbeddedServer, own_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_FRESH_S", 0.0)
    secret = create_key(own_client, "ci", roles=["read"])
    async with connect_async(own_server.url, num_retries=0) as client:
        checks, local = (KeyChecks(client, requires_key=each) for each in (True, False))
        await checks.identify(secret)
        own_server.kill()

        assert (await checks.identify(secret)).name == "ci"
        assert (await local.identify("tml-any")).name == "local"
        with pytest.raises(StoreUnavailableError):
            await checks.identify("tml-never-seen")
        monkeypatch.setattr(records, "_OUTAGE_S", 0.0)
        with pytest.raises(StoreUnavailableError):
            await checks.identify(secret)
    own_server.restart()


async def test_silent_store_delays_a_known_key_for_seconds_at_most(
    own_server: EmbeddedServer, own_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_FRESH_S", 0.0)
    monkeypatch.setattr(records, "_ANSWER_S", 0.2)
    secret = create_key(own_client, "ci", roles=["read"])
    async with connect_async(own_server.url) as client:
        checks = KeyChecks(client, requires_key=True)
        await checks.identify(secret)
        own_client.execute_command("CLIENT", "PAUSE", 8_000, "ALL")
        began_s = time.monotonic()

        key = await checks.identify(secret)

        assert key.name == "ci"
        assert time.monotonic() - began_s < 6
        await asyncio.to_thread(own_client.ping)


async def test_unreadable_record_is_no_accepted_key(
    own_server: EmbeddedServer, own_client: redis.Redis
) -> None:
    for number, record in enumerate((b"", b"[]", b"{}", json.dumps({"name": 3}).encode())):
        own_client.hset(KEYS, key_id_of(f"tml-{number}"), record)  # pyright: ignore[reportArgumentType]
    async with connect_async(own_server.url) as client:
        checks = KeyChecks(client, requires_key=True)

        for number in range(4):
            with pytest.raises(UnknownKeyError, match="cannot be read"):
                await checks.identify(f"tml-{number}")
