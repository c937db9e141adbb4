"""The process of a gateway: its memory, its connections to the store, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from testkit import wait_until
from testkit.services.gateway_thread import GatewayThread
from turnstream.store.client.connection import connect
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway import service
from turnstream_server.gateway.state import bounded_client
from turnstream_server.keys.store import create_key

PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20
BLOCK_BYTES = 2_000
"""Above 512 bytes a block comes from the C library; it is smaller than a page."""


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and needs glibc")
def test_gateway_returns_free_memory_between_blocks_in_use(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [bytes(BLOCK_BYTES) for _ in range(50_000)]
    in_use = blocks[::100]
    del blocks
    before_mb = resident_mb()
    monkeypatch.setattr(service, "_RETURN_EVERY_S", 0.05)

    with GatewayThread(server.url):
        wait_until(lambda: resident_mb() < before_mb - 50, describe="50 MB less")

    assert len(in_use) == 500


async def test_bounded_client_lends_the_connection_unused_longest(server: EmbeddedServer) -> None:
    async with bounded_client(server.url, max_connections=3) as client:
        await asyncio.gather(*(client.client_id() for _ in range(3)))

        ids = [await client.client_id() for _ in range(6)]

    assert len({*ids}) == 3
    assert ids[:3] == ids[3:]


@pytest.mark.slow
def test_the_process_stops_cleanly_at_a_signal(server: EmbeddedServer, tmp_path: Path):
    address = tmp_path / "address"
    command = [sys.executable, "-m", "turnstream_server", "serve", "gateway", "--redis", server.url]
    options = ["--listen", "0.0.0.0:0", "--address-file", str(address)]
    with connect(server.url) as client:
        known = create_key(client, "a process", roles=["train"])
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        wait_until(address.exists)
        url = f"http://{address.read_text()}/api/v1/client/config"

        statuses = [
            httpx2.post(url, headers={"X-API-Key": key}).status_code for key in (known, "tml-other")
        ]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)

    assert statuses == [200, 401]
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
