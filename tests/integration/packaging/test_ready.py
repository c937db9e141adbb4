"""The health command of the images: its status follows /readyz, and its output has the reason."""

from __future__ import annotations

import subprocess
import sys

import pytest

from testkit.services.compose import REPOSITORY
from turnstream_server.embedded import free_port
from turnstream_server.listener import serve_metrics
from turnstream_server.telemetry.readiness import Readiness


def ready_command(port: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-IS", REPOSITORY / "deploy/ready.py"],
        env={"TURNSTREAM_METRICS_LISTEN": f"0.0.0.0:{port}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("reason", "status", "printed"),
    [("", 0, '"ready": true'), ("the disk is full", 1, "the disk is full")],
)
def test_health_command_follows_the_readiness_of_its_service(
    reason: str, status: int, printed: str
) -> None:
    readiness = Readiness("batcher")
    readiness.add("store", lambda: reason)
    with serve_metrics("127.0.0.1", 0, readiness=readiness) as listener:
        done = ready_command(listener.port)

    assert done.returncode == status
    assert printed in done.stdout
    assert done.stderr == ""


def test_health_command_fails_while_nothing_listens() -> None:
    done = ready_command(free_port())

    assert done.returncode == 1
    assert "refused" in done.stderr
