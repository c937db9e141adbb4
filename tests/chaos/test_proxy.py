"""The proxy cuts, delays and silences real connections as it promises."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from harness.proxy import Proxy
from testkit import wait_until
from turnstream.store.client.connection import connect
from turnstream.store.client.deadlines import ending_within
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis


@pytest.fixture
def embedded() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as embedded:
        yield embedded


@pytest.fixture
def proxy(embedded: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy(embedded.url) as proxy:
        yield proxy


@pytest.fixture
def through(proxy: Proxy) -> Iterator[redis.Redis]:
    with connect(proxy.url, num_retries=0) as client:
        client.ping()
        yield client


def test_reply_is_cut_after_the_request_has_arrived(proxy: Proxy, through: redis.Redis) -> None:
    proxy.cut_next_reply()

    with pytest.raises(RedisConnectionError):
        through.incr("counter")

    assert proxy.replies.num_cuts == 1
    assert through.get("counter") == b"1"


def test_replies_are_cut_by_the_bytes_of_their_request(proxy: Proxy, through: redis.Redis) -> None:
    proxy.cut_answers(b"INCRBY", after_bytes=[0, None, 2])

    through.set("key", b"x")  # without these bytes
    with pytest.raises(RedisConnectionError):
        through.incrby("counter", 1)
    through.incrby("counter", 1)
    with pytest.raises(RedisConnectionError):
        through.incrby("counter", 1)

    assert proxy.replies.num_cuts == 2
    assert through.get("counter") == b"3"


def test_connections_are_cut_after_a_number_of_bytes(proxy: Proxy) -> None:
    proxy.cut_connections(after_bytes=[40, 600])

    with connect(proxy.url, num_retries=0) as through:
        for num_passed in (0, 1):
            for _ in range(num_passed):
                assert through.echo(b"x" * 400) == b"x" * 400
            with pytest.raises(RedisConnectionError):
                through.echo(b"x" * 400)

        assert proxy.replies.num_cuts == 2
        assert through.echo(b"x" * 1000) == b"x" * 1000


def test_silent_direction_receives_and_never_answers(proxy: Proxy, through: redis.Redis) -> None:
    proxy.replies.is_silent = True

    with ending_within(0.1), pytest.raises(RedisTimeoutError):
        through.incr("counter")

    proxy.replies.is_silent = False
    wait_until(lambda: through.get("counter") == b"1", describe="the request, which arrived")


def test_request_stops_within_its_bytes(proxy: Proxy, through: redis.Redis) -> None:
    through.set("key", b"before")
    proxy.requests.stop_within = b"after"

    with ending_within(0.1), pytest.raises(RedisTimeoutError):
        through.set("key", b"after")

    wait_until(lambda: proxy.requests.num_stops == 1, describe="the stop")
    assert through.get("key") == b"before"
    assert through.set("key", b"after")  # only one request stops


def test_reply_stops_on_a_connection_that_stays_open(proxy: Proxy, through: redis.Redis) -> None:
    through.set("key", b"x" * 200_000)
    proxy.replies.stop_after_bytes = 150_000

    with ThreadPoolExecutor(1) as reader:
        answer = reader.submit(through.get, "key")
        wait_until(lambda: proxy.replies.num_stops == 1, describe="the stop")
        with pytest.raises(TimeoutError):
            answer.result(0.2)
        assert proxy.replies.num_cuts == 0
        proxy.cut_all()
        with pytest.raises(RedisConnectionError):
            answer.result(30)


def test_replies_are_delayed_or_held_until_a_time(proxy: Proxy, through: redis.Redis) -> None:
    started_s = time.monotonic()
    proxy.replies.delay_s = 0.1
    through.ping()
    assert time.monotonic() - started_s >= 0.1

    proxy.replies.held_until_s = until_s = time.monotonic() + 0.2
    through.ping()
    assert time.monotonic() >= until_s
