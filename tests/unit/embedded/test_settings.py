from __future__ import annotations

import os

import pytest
from pydantic import ValidationError

from turnstream_server.settings import Settings, mask_password


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("TURNSTREAM_"):
            monkeypatch.delenv(name)


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNSTREAM_DATA_DIR", "")
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", "")

    assert Settings() == Settings(data_dir=None, redis_url=None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DURABILITY", "always"),
        ("BATCHER_PORT", "70000"),
        ("LEASE_S", "0"),
        ("GET_WAIT_MAX_S", "soon"),
        ("LOG_LEVEL", "LOUD"),
    ],
)
def test_a_senseless_value_names_its_setting(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"TURNSTREAM_{name}", value)

    with pytest.raises(ValidationError, match=name.lower()):
        Settings()


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
