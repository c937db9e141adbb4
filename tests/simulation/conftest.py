"""`pytest tests/simulation --seed N` simulates one seed again."""

from __future__ import annotations

import pytest

from testkit.services import servers

server = servers.server_of_each_kind


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="simulate only this seed")
