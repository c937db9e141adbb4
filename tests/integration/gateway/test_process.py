"""`turnstream serve gateway` as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from testkit import wait_until
from turnstream.store.client.connection import connect
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.keys.store import create_key


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
