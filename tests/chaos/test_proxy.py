"""The proxy does to real connections what it says."""

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
from turnstream.store.connection import connect
from turnstream.store.limits import ending_within
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis


@pytest.fixture
def embedded() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def proxy(embedded: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy(embedded.url) as proxy:
        yield proxy


@pytest.fixture
def through(proxy: Proxy) -> Iterator[redis.Redis]:
    with connect(proxy.url, num_retries=0) as client:
        yield client


def test_bytes_pass(through: redis.Redis) -> None:
    through.set("key", b"x" * 1_000_000)

    assert through.get("key") == b"x" * 1_000_000


def test_a_reply_is_cut_after_the_request_has_arrived(
    proxy: Proxy, through: redis.Redis, embedded: EmbeddedServer
) -> None:
    through.ping()
    proxy.cut_next_reply()

    with pytest.raises(RedisConnectionError):
        through.incr("counter")

    assert proxy.replies.num_cuts == 1
    assert through.get("counter") == b"1"


def test_a_reply_is_cut_in_its_middle(proxy: Proxy, through: redis.Redis) -> None:
    through.set("key", b"x" * 1000)
    proxy.cut_next_reply(after_bytes=500)

    with pytest.raises(RedisConnectionError):
        through.get("key")

    assert through.get("key") == b"x" * 1000


def test_answers_are_cut_by_what_was_asked(
    proxy: Proxy, through: redis.Redis, embedded: EmbeddedServer
) -> None:
    proxy.cut_answers(b"INCRBY", after_bytes=[0, None, 2])

    through.set("key", b"x")  # asks something else
    with pytest.raises(RedisConnectionError):
        through.incrby("counter", 1)
    through.incrby("counter", 1)
    with pytest.raises(RedisConnectionError):
        through.incrby("counter", 1)
    through.incrby("counter", 1)

    assert proxy.replies.num_cuts == 2
    assert through.get("counter") == b"4"


def test_connections_are_cut_behind_so_many_bytes_whatever_is_asked(
    proxy: Proxy, through: redis.Redis
) -> None:
    proxy.cut_connections(after_bytes=[40, 600])

    for num_passed in (0, 1):
        for _ in range(num_passed):
            assert through.echo(b"x" * 400) == b"x" * 400
        with pytest.raises(RedisConnectionError):
            through.echo(b"x" * 400)

    assert proxy.replies.num_cuts == 2
    assert through.echo(b"x" * 1000) == b"x" * 1000


def test_a_direction_that_is_silent_takes_and_never_answers(
    proxy: Proxy, through: redis.Redis, embedded: EmbeddedServer
) -> None:
    through.ping()
    proxy.replies.is_silent = True

    with ending_within(0.1), pytest.raises(RedisTimeoutError):
        through.incr("counter")

    proxy.replies.is_silent = False
    wait_until(lambda: through.get("counter") == b"1", describe="the request, which arrived")


def test_a_request_stops_within_its_bytes_and_is_never_whole(
    proxy: Proxy, through: redis.Redis, embedded: EmbeddedServer
) -> None:
    through.set("key", b"before")
    proxy.requests.stop_within = b"behind"

    with ending_within(0.1), pytest.raises(RedisTimeoutError):
        through.set("key", b"behind")

    wait_until(lambda: proxy.requests.num_stops == 1, describe="the stop")
    assert through.get("key") == b"before"
    assert through.set("key", b"behind")  # it stops once


def test_a_reply_stops_behind_so_many_bytes_on_a_connection_that_stays_open(
    proxy: Proxy, through: redis.Redis
) -> None:
    through.set("key", b"x" * 200_000)
    proxy.replies.stop_after_bytes = 150_000

    with ThreadPoolExecutor(1) as reader:
        answer = reader.submit(through.get, "key")
        wait_until(lambda: proxy.replies.num_stops == 1, describe="the stop")
        with pytest.raises(TimeoutError):
            answer.result(0.2)
        num_cuts = proxy.replies.num_cuts
        proxy.cut_all()
        with pytest.raises(RedisConnectionError):
            answer.result(30)

    assert num_cuts == 0
    assert through.get("key") == b"x" * 200_000  # it stops once


def test_a_direction_can_be_slow(proxy: Proxy, through: redis.Redis) -> None:
    through.ping()
    proxy.replies.delay_s = 0.1
    started_s = time.monotonic()

    through.ping()

    assert time.monotonic() - started_s >= 0.1


def test_a_direction_can_be_held_until_a_moment(proxy: Proxy, through: redis.Redis) -> None:
    through.ping()
    proxy.replies.held_until_s = until_s = time.monotonic() + 0.1

    through.ping()

    assert time.monotonic() >= until_s


def test_all_connections_are_reset_at_once(proxy: Proxy, through: redis.Redis) -> None:
    before = through.client_id()
    proxy.cut_all()

    assert through.client_id() != before
