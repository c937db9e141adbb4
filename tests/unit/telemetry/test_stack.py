from __future__ import annotations

from pathlib import Path

import pytest

from turnstream_server.launch.stack import Stack


def test_services_of_one_job_do_not_share_the_address_of_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNSTREAM_METRICS_LISTEN", "127.0.0.1:9100")
    monkeypatch.setenv("TURNSTREAM_LOG_FORMAT", "json")

    environment = Stack(tmp_path)._full_environment()

    assert "TURNSTREAM_METRICS_LISTEN" not in environment
    assert environment["TURNSTREAM_LOG_FORMAT"] == "json"
