"""A store that the command line finds in its environment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from turnstream_server.embedded import EmbeddedServer


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a store, also in the environment."""
    monkeypatch.setenv("COLUMNS", "100")
    with EmbeddedServer() as server:
        monkeypatch.setenv("TURNSTREAM_REDIS_URL", server.url)
        yield server.url
