"""Calls of the store end by the deadline of their block."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import redis
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from turnstream.store.client.connection import connect
from turnstream.store.client.deadlines import SOCKET_TIMEOUT_S, ending_by, ending_within
from turnstream_server.embedded import EmbeddedServer, free_port

pytestmark = pytest.mark.redis

LONGEST_S = 20.0
"""Far above any deadline here, on a machine that is busy, and below the socket's own timeout."""


@pytest.fixture
def silent() -> Iterator[redis.Redis]:
    """A client of something that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with connect(f"redis://127.0.0.1:{port}") as client:
            yield client


@pytest.mark.parametrize("outer_s", [60.0, 0.1])
def test_call_ends_by_the_earlier_of_two_deadlines(silent: redis.Redis, outer_s: float) -> None:
    began_s = time.monotonic()

    with pytest.raises(RedisTimeoutError), ending_within(outer_s), ending_within(60.1 - outer_s):
        silent.ping()

    assert 0.1 <= time.monotonic() - began_s < LONGEST_S


def test_a_server_that_is_silent_is_not_asked_again() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        connect(f"redis://127.0.0.1:{listener.getsockname()[1]}", silent_s=0.1) as client,
    ):
        with pytest.raises(RedisTimeoutError):
            client.ping()

        listener.settimeout(0)
        listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_tries_of_a_lost_connection_end_by_the_deadline_too() -> None:
    with connect(f"redis://127.0.0.1:{free_port()}", num_retries=1_000) as client:
        began_s = time.monotonic()

        with pytest.raises(RedisError), ending_within(0.2):
            client.ping()

        assert time.monotonic() - began_s < LONGEST_S


def test_a_connection_that_was_limited_has_its_own_timeout_again(server: EmbeddedServer) -> None:
    with connect(server.url) as client:
        with ending_by(time.monotonic() + LONGEST_S):
            client.ping()
        (connection,) = client.connection_pool._available_connections
        limited_s = connection._sock.gettimeout()

        client.ping()
        own_s = connection._sock.gettimeout()

    assert 0 < limited_s < LONGEST_S
    assert (own_s, connection.socket_timeout) == (SOCKET_TIMEOUT_S, SOCKET_TIMEOUT_S)
