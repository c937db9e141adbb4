"""A password of the store that lies in a file: services wait for it, and nothing shows it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import turnstream
from testkit.services.compose import LocalStack
from turnstream.errors import StoreUnavailableError
from turnstream_server import waits
from turnstream_server.ledger.core.stores import open_store
from turnstream_server.settings import Settings

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Run a store whose users have passwords."""
    with LocalStack(tmp_path_factory.mktemp("passwords")) as stack:
        stack.start_store()
        waits.wait_for_store(stack.store_url("operator"), durability="everysec", timeout_s=30)
        yield stack


@pytest.fixture
def settings(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return the settings of the operator: its URL without a password, and the file."""
    file = stack.volume("store-operator") / "password"
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", f"redis://operator@127.0.0.1:{stack.store_port}")
    monkeypatch.setenv("TURNSTREAM_REDIS_PASSWORD_FILE", str(file))
    return Settings()


def test_url_has_the_password_of_the_file_and_settings_do_not_show_it(
    stack: LocalStack, settings: Settings
) -> None:
    with turnstream.connect() as service, open_store(settings) as url:
        assert service.runs() == []
        assert url == waits.store_url(settings) == stack.store_url("operator")
    own = "redis://operator:own@127.0.0.1:1"
    assert waits.store_url(settings, own) == own
    password = (stack.volume("store-operator") / "password").read_text()
    assert password not in f"{settings.printable()} {settings!r}"


def test_service_waits_for_the_file_of_its_password(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "_RETRY_S", 0.05)
    file = tmp_path / "password"
    settings = settings.model_copy(update={"redis_password_file": file})
    timer = threading.Timer(0.4, lambda: file.write_text("from/file\n"))
    timer.start()

    url = waits.store_url(settings)

    timer.join()
    assert "operator:from%2Ffile@" in url


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_missing_password_names_the_variable_and_the_file(
    settings: Settings, tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "password"
    if text is not None:
        file.write_text(text)
    changes = {"redis_password_file": file, "start_wait_s": 0.0}

    with pytest.raises(StoreUnavailableError, match=f"TURNSTREAM_REDIS_PASSWORD_FILE={file}"):
        waits.store_url(settings.model_copy(update=changes))
