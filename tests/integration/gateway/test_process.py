"""`turnstream serve gateway` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from testkit import wait_until
from turnstream_server.embedded import EmbeddedServer


@pytest.mark.slow
def test_the_process_stops_cleanly_at_a_signal(server: EmbeddedServer, tmp_path: Path):
    address = tmp_path / "address"
    command = [sys.executable, "-m", "turnstream_server", "serve", "gateway", "--redis", server.url]
    options = ["--listen", "127.0.0.1:0", "--address-file", str(address)]
    environment = {**os.environ, "TURNSTREAM_API_KEYS": "tml-a, tml-b"}
    with subprocess.Popen(
        [*command, *options], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(address.exists)
        url = f"http://{address.read_text()}/api/v1/client/config"

        statuses = [
            httpx2.post(url, headers={"X-API-Key": key}).status_code for key in ("tml-b", "tml-c")
        ]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)

    assert statuses == [200, 401]
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
