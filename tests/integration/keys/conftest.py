"""A store, and certificates of a service on this machine."""

from __future__ import annotations

import pytest

from testkit.services import servers
from testkit.services.certificates import certificates as certificates

server = servers.shared_server


@pytest.fixture(autouse=True)
def no_key_of_the_desk(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "KEY_FILE", "INSECURE", "TLS_CA", "TLS_CERT", "TLS_KEY"):
        monkeypatch.delenv(f"TURNSTREAM_{name}", raising=False)
