"""`turnstream.connect`: wrong settings, wrong addresses and wrong names."""

from __future__ import annotations

from typing import Any

import pytest

import turnstream
from turnstream.errors import InvalidConfigError, StoreUnavailableError
from turnstream_server.embedded import free_port

pytestmark = pytest.mark.redis


def test_unknown_setting_is_refused_with_the_nearest_name(server: Any) -> None:
    with turnstream.connect(server.url) as service:
        with pytest.raises(InvalidConfigError, match=r"batch_group: .*did you mean batch_groups"):
            service.create_run("api", batch_group=8)
        with pytest.raises(InvalidConfigError, match="batch_groups: it is missing"):
            service.create_run("api", estimator="grpo")
        assert "api" not in service.runs()

        run = service.create_run("api", batch_groups=8)
        assert (run.config.batch_groups, run.config.mini_batch_groups) == (8, 8)
        with pytest.raises(InvalidConfigError, match=r"max_stalenes: .*did you mean max_staleness"):
            run.revise(from_step=3, max_stalenes=2)


def test_address_without_a_store_is_refused_with_the_command_to_start_one() -> None:
    port = free_port()

    with pytest.raises(StoreUnavailableError, match=f"127.0.0.1:{port}.*turnstream up"):
        turnstream.connect(f"redis://127.0.0.1:{port}")


def test_unknown_public_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'conect'"):
        _ = turnstream.conect  # type: ignore[attr-defined]
    assert sorted(turnstream.__all__) == turnstream.__all__
    assert all(hasattr(turnstream, name) for name in turnstream.__all__)
