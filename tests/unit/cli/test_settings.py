from __future__ import annotations

import os

import pytest

from turnstream.errors import InvalidConfigError
from turnstream_server.settings import (
    Settings,
    checked_gateway_url,
    mask_password,
    read_settings,
    unknown_name,
)


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("TURNSTREAM_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TURNSTREAM_LEASE_S", "inf", "TURNSTREAM_LEASE_S: .*finite"),
        ("TURNSTREAM_LEASE_S", "0", "TURNSTREAM_LEASE_S: "),
        ("TURNSTREAM_DURABILITY", "always", "TURNSTREAM_DURABILITY: "),
        ("TURNSTREAM_BATCHER_PORT", "70000", "TURNSTREAM_BATCHER_PORT: "),
        ("TURNSTREAM_GET_WAIT_MAX_S", "soon", "TURNSTREAM_GET_WAIT_MAX_S: "),
        ("TURNSTREAM_LOG_LEVEL", "LOUD", "TURNSTREAM_LOG_LEVEL: "),
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


def test_gateway_url_is_an_address_without_a_key() -> None:
    for url, found in (("", ""), ("https://gw.lab/a/", "https://gw.lab/a"), ("http://h:1", None)):
        assert checked_gateway_url(url, field="--url") == (url if found is None else found)
    for url in ("gw.lab", "redis://h:1", "http://", "http://:key@h", "http://h:x", "http://h?a"):
        with pytest.raises(InvalidConfigError, match=r"^--url: "):
            checked_gateway_url(url, field="--url")


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNSTREAM_DATA_DIR", "")
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", "")

    assert Settings() == Settings(data_dir=None, redis_url=None)


def test_every_setting_is_printed_and_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", "redis://me:secret@host:1/0")

    printed = Settings().printable()

    assert len(printed) == len(Settings.model_fields)
    assert printed["TURNSTREAM_REDIS_URL"] == "redis://me:***@host:1/0"
    assert "secret" not in repr(Settings())


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://:s@host", "redis://:***@host"),
        ("rediss://me:s:e/c@r@host:1", "rediss://me:***@host:1"),
        ("unix:///run/redis.sock?db=0&password=s", "unix:///run/redis.sock?db=0&password=***"),
        ("unix://me:s@/run/redis.sock", "unix://me:***@/run/redis.sock"),
    ],
)
def test_a_password_is_masked_wherever_a_url_may_carry_it(url: str, masked: str) -> None:
    assert mask_password(url) == masked
