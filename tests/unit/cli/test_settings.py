from __future__ import annotations

import pytest

from turnstream.errors import InvalidConfigError
from turnstream_server.settings import read_settings, unknown_name


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TURNSTREAM_LEASE_S", "inf", "TURNSTREAM_LEASE_S: .*finite"),
        ("TURNSTREAM_START_WAIT_S", "nan", "TURNSTREAM_START_WAIT_S: "),
        ("TURNSTREAM_REDIS_ULR", "redis://s", "did you mean TURNSTREAM_REDIS_URL"),
        ("TURNSTREAM_COLOUR", "red", "it is no setting; see `turnstream config`"),
    ],
)
def test_settings_refuse_useless_values_and_unknown_names(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(InvalidConfigError, match=message):
        read_settings()


def test_settings_ignore_the_service_variables_of_kubernetes() -> None:
    of_service = {
        "TURNSTREAM_STORE_SERVICE_HOST": "10.0.0.7",
        "TURNSTREAM_STORE_SERVICE_PORT_REDIS": "6379",
        "TURNSTREAM_STORE_PORT": "tcp://10.0.0.7:6379",
        "TURNSTREAM_STORE_PORT_6379_TCP_ADDR": "10.0.0.7",
    }

    assert unknown_name(of_service) is None
