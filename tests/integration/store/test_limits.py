"""Calls of a store that does not answer end in time."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from testkit import wait_until
from turnstream.store.client.connection import connect, limited_client
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

LONGEST_S = 20.0
"""Far above any deadline here, on a machine that is busy, and below the socket's own timeout."""


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


def test_limited_client_repeats_a_read_whose_connection_is_lost(server: EmbeddedServer) -> None:
    with (
        connect(server.url) as client,
        limited_client(client, timeout_s=LONGEST_S) as limited,
        ThreadPoolExecutor(1) as threads,
    ):
        reading = threads.submit(limited.xread, {"none": "$"}, block=500)
        wait_until(lambda: client.info("clients")["blocked_clients"] == 1)
        client.client_kill_filter(_type="normal", skipme=True)

        assert not reading.result()
