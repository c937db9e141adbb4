"""A running gateway returns memory to the system that the C library has kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from testkit import wait_until
from testkit.gateway_thread import GatewayThread
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway import service

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
