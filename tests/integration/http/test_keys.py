"""API keys of generators: where they come from, and what they allow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis

import turnstream
from testkit import group, ids, wait_until
from testkit.services.batchers import BatcherThread
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from turnstream.errors import (
    AccessDeniedError,
    InvalidConfigError,
    RejectedError,
    StoreUnavailableError,
    UnknownKeyError,
)
from turnstream.generator import Publisher
from turnstream.store.client.addresses import address_of
from turnstream.types import TrajectoryKey
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.keys.records import KeyLimits
from turnstream_server.keys.store import create_key, revoke_key

pytestmark = pytest.mark.redis


@pytest.fixture
def gateway(new_gateway: Callable[..., GatewayThread]) -> GatewayThread:
    """A gateway whose requests need a key."""
    return new_gateway(requires_key=True)


@pytest.fixture
def run(client: redis.Redis, new_run: Callable[..., str]) -> str:
    return new_run(client)


@pytest.fixture
def new_key(client: redis.Redis, run: str) -> Callable[..., str]:
    """`new_key("produce", runs=[..])` stores a key and returns it."""

    def make(*roles: Any, **options: Any) -> str:
        return create_key(client, f"{roles} of {run}", roles=roles, **options)

    return make


def test_generator_needs_the_role_produce_alone(
    gateway: GatewayThread, client: redis.Redis, run: str, new_key: Callable[..., str]
) -> None:
    key = new_key("produce", runs=[run])

    with turnstream.connect(gateway.base_url, api_key=key) as service:
        opened = service.run(run)
        with opened.publisher("w") as publisher:
            publisher.publish(group("g")).result()
            with publisher.trajectory("late", 0, num_samples=1) as late:
                late.append(ids("a"), ids("B"))
                late.seal(awaits_reward=True)
            publisher.post_reward(TrajectoryKey("late", 0), 1.0)
            with pytest.raises(AccessDeniedError, match="has the roles produce, needed is admin"):
                publisher.close_run()
            publisher.publish(group("h")).result()
        assert opened.credit().num_groups > 0
        assert service.runs() == [run]
        for call in (opened.pause, opened.close, lambda: service.create_run(run, batch_groups=1)):
            with pytest.raises(AccessDeniedError, match="needed is admin"):
                call()
        with pytest.raises(AccessDeniedError, match="may use the runs"):
            service.run("another")

    assert RunReader(client, run).counts() == {"accepted": 5, "sealed": 5}


def test_key_comes_from_the_argument_then_the_environment(
    gateway: GatewayThread, run: str, new_key: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key, file = new_key("produce"), tmp_path / "key"
    file.write_text(f"{key}\n")

    with pytest.raises(UnknownKeyError, match="the request has no key"):
        turnstream.connect(gateway.base_url)
    monkeypatch.setenv("TURNSTREAM_KEY_FILE", str(file))
    turnstream.connect(gateway.base_url).close()
    with Publisher(gateway.base_url, run) as publisher:
        publisher.publish(group("g")).result()
    monkeypatch.setenv("TURNSTREAM_API_KEY", "tml-wrong")
    with pytest.raises(UnknownKeyError, match="is unknown or revoked"):
        turnstream.connect(gateway.base_url)
    turnstream.connect(gateway.base_url, api_key=key).close()
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", gateway.base_url)
    turnstream.connect(api_key=key).close()


@pytest.mark.parametrize("way", ["redis", "http"])
def test_batches_take_the_key_of_the_connection_unless_given(
    gateway: GatewayThread,
    server: EmbeddedServer,
    run: str,
    new_key: Any,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TURNSTREAM_API_KEY", "tml-of-the-environment")
    url, key = {"redis": server.url, "http": gateway.base_url}[way], new_key("train")

    with (
        BatcherThread(server.url, requires_key=True),
        turnstream.connect(url, api_key=key) as service,
    ):
        opened = service.run(run)
        opened.batches(timeout_s=30).close()
        for given, why in (("tml-other", "unknown or revoked"), ("", "has no key")):
            with pytest.raises(UnknownKeyError, match=why):
                opened.batches(timeout_s=30, api_key=given)
        monkeypatch.setenv("TURNSTREAM_API_KEY", key)
        with turnstream.connect(url) as service:
            service.run(run).batches(timeout_s=30).close()


def test_key_is_shown_nowhere(
    gateway: GatewayThread, run: str, new_key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    key = new_key("produce")
    caplog.set_level(logging.DEBUG)

    with turnstream.connect(gateway.base_url, api_key=key) as service:
        opened = service.run(run)
        with opened.publisher() as publisher:
            publisher.publish(group("g")).result()
        client: Any = vars(service._calls)["_client"]
        shown = [service, opened, service.url, service._calls, client, client.gateway]
        with pytest.raises(AccessDeniedError) as denied:
            opened.pause()
    gateway.stop()
    with pytest.raises(StoreUnavailableError) as away:
        turnstream.connect(gateway.base_url, api_key=key)

    texts = [*map(repr, shown), str(denied.value), str(away.value), *caplog.messages]
    assert [text for text in texts if key in text] == []
    assert [text for text in caplog.messages if text.startswith("HTTP Request")] == []
    with pytest.raises(InvalidConfigError) as wrong:
        turnstream.connect(f"http://:{key}@host:7601/?x=1")
    assert key not in str(wrong.value)


def test_revoked_key_ends_a_publisher(
    gateway: GatewayThread, client: redis.Redis, run: str, new_key: Any
) -> None:
    key = new_key("produce")
    with turnstream.connect(gateway.base_url, api_key=key) as service:
        publisher = service.run(run).publisher("w")
        publisher.publish(group("g")).result()
        revoke_key(client, f"('produce',) of {run}")

        def is_refused() -> bool:
            try:
                service.ping()
            except UnknownKeyError:
                return True
            return False

        wait_until(is_refused, describe="the end of the cache")
        receipt = publisher.publish(group("h"))
        with pytest.raises(UnknownKeyError, match="is unknown or revoked"):
            receipt.result(30)
        publisher.close()


def test_limited_rate_delays_and_a_large_body_is_an_error(
    gateway: GatewayThread, client: redis.Redis, run: str, new_key: Any
) -> None:
    key = new_key("produce", limits=KeyLimits(requests_per_s=4.0, max_body_bytes=200_000))

    with turnstream.connect(gateway.base_url, api_key=key) as service:
        opened = service.run(run)
        with opened.publisher("w") as publisher:
            for number in range(4):
                publisher.publish(group(f"g{number}")).result()
            num_retries = publisher.statistics().num_retries
            assert RunReader(client, run).counts() == {"accepted": 8, "sealed": 8}
            open_ = publisher.trajectory("h", 0, num_samples=1)
            with pytest.raises(RejectedError, match="HTTP 413: the body has more than 200000"):
                open_.append(ids("a"), ids("B" * 100_000)).result(30)
        assert opened.config.batch_groups == 100

    assert num_retries == 0


def test_certificates_of_the_gateway_are_checked(
    new_gateway: Callable[..., GatewayThread],
    run: str,
    certificates: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = new_gateway(tls=certificates.tls)
    assert gateway.address.startswith("https://127.0.0.1:")
    url = f"https://{address_of(gateway.address)}"
    with pytest.raises(httpx2.RemoteProtocolError):
        httpx2.get(f"{url.replace('https://', 'http://')}/healthz")

    with pytest.raises(StoreUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
        turnstream.connect(url)
    monkeypatch.setenv("TURNSTREAM_TLS_CA", str(certificates.ca))
    with turnstream.connect(url) as service, service.run(run).publisher("w") as publisher:
        publisher.publish(group("g")).result()
    monkeypatch.setenv("TURNSTREAM_TLS_CA", "/no/such/file")
    with pytest.raises(InvalidConfigError, match="TURNSTREAM_TLS_CA: /no/such/file cannot be read"):
        turnstream.connect(url)
    monkeypatch.setenv("TURNSTREAM_TLS_CA", str(certificates.tls.key))
    with pytest.raises(InvalidConfigError, match="TURNSTREAM_TLS_CA: has no certificates"):
        Publisher(url, run)


def test_other_address_is_refused(server: Any, gateway: GatewayThread) -> None:
    with pytest.raises(RejectedError, match=r"/api is no gateway of this release: HTTP 404"):
        turnstream.connect(f"{gateway.base_url}/api")
    with pytest.raises(StoreUnavailableError, match="no gateway answers at"):
        turnstream.connect(f"http://{address_of(server.url)}")
    for url, message in {
        "http://": "it has no host",
        "http://me:tml-x@host": "it has a user",
        "http://host/?key=1": "a part after",
        "http://host:99999": "not the address of a store",
    }.items():
        with pytest.raises(InvalidConfigError, match=message) as refused:
            turnstream.connect(url)
        assert "tml-x" not in str(refused.value)
