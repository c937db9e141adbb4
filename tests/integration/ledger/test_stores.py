from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import SecretStr

from turnstream.errors import InvalidConfigError, StoreUnavailableError
from turnstream.store.client.addresses import address_of
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.core.stores import check_store, open_store
from turnstream_server.settings import Settings


@pytest.fixture
def external(server: EmbeddedServer, client: redis.Redis) -> Iterator[EmbeddedServer]:
    """A server that plays the external one; its settings are put back."""
    names = ("appendonly", "appendfsync", "maxmemory-policy", "no-appendfsync-on-rewrite")
    before: dict[str, Any] = client.config_get(*names)  # pyright: ignore[reportAssignmentType]  # sync
    yield server
    for name, value in before.items():
        client.config_set(name, value)


def test_the_embedded_server_runs_for_as_long_as_it_is_needed(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, durability="fsync", store_max_bytes=50_000_000)

    with open_store(settings) as url:
        client = redis.Redis.from_url(url, decode_responses=True)
        config = client.config_get("appendfsync", "maxmemory", "dir")

    assert config == {"appendfsync": "always", "maxmemory": "50000000", "dir": str(tmp_path)}
    with pytest.raises(redis.ConnectionError):
        client.ping()


def test_an_external_server_is_used_and_left_running(external: EmbeddedServer) -> None:
    settings = Settings(redis_url=SecretStr(external.url))

    with open_store(settings) as url:
        assert url == external.url

    check_store(external.url, durability="everysec")
    assert external.is_running


@pytest.mark.parametrize(
    ("setting", "value", "needed", "durability"),
    [
        ("appendonly", "no", "yes", "everysec"),
        ("maxmemory-policy", "allkeys-lru", "noeviction", "everysec"),
        ("appendfsync", "everysec", "always", "fsync"),
        ("appendfsync", "no", "everysec", "everysec"),
        ("no-appendfsync-on-rewrite", "yes", "no", "everysec"),
    ],
)
def test_an_external_server_that_would_lose_data_is_refused(
    external: EmbeddedServer,
    client: redis.Redis,
    setting: str,
    value: str,
    needed: str,
    durability: str,
) -> None:
    client.config_set(setting, value)

    with pytest.raises(InvalidConfigError) as caught:
        check_store(external.url, durability=durability)

    assert caught.value.field == setting
    assert repr(value) in caught.value.message
    assert repr(needed) in caught.value.message
    assert address_of(external.url) in caught.value.message


def test_server_without_sync_during_a_rewrite_is_refused(
    external: EmbeddedServer, client: redis.Redis
) -> None:
    client.config_set("appendfsync", "always")
    client.config_set("no-appendfsync-on-rewrite", "yes")

    for durability in ("everysec", "fsync"):
        with pytest.raises(InvalidConfigError, match=r"no-appendfsync-on-rewrite: .* has 'yes'"):
            check_store(external.url, durability=durability)


def test_server_with_unreadable_settings_counts_as_everysec(
    external: EmbeddedServer, client: redis.Redis
) -> None:
    client.execute_command("ACL", "SETUSER", "guest", "on", ">s", "~*", "+@all", "-config")
    url = external.url.replace("redis://", "redis://guest:s@")

    check_store(url, durability="everysec")
    with pytest.raises(InvalidConfigError, match="has 'hidden'; needed is 'always'"):
        check_store(url, durability="fsync")


def test_a_server_that_is_away_is_unavailable() -> None:
    with EmbeddedServer() as stopped:
        url = stopped.url

    with pytest.raises(StoreUnavailableError):
        check_store(url, durability="everysec")


def test_a_url_of_another_kind_names_the_setting() -> None:
    with pytest.raises(InvalidConfigError, match=r"^TURNSTREAM_REDIS_URL: "):
        check_store("ftp://localhost", durability="everysec")


def test_a_password_is_not_shown_in_an_error(external: EmbeddedServer, client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "someone", "on", ">secret", "~*", "+@all")
    client.config_set("appendonly", "no")
    url = external.url.replace("redis://", "redis://someone:secret@")

    with pytest.raises(InvalidConfigError, match="appendonly") as caught:
        check_store(url, durability="everysec")

    assert "secret" not in str(caught.value)
