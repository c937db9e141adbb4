"""The file of a key, and files of certificates."""

from __future__ import annotations

import multiprocessing
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from turnstream.errors import InvalidConfigError
from turnstream.store.client.api_keys import own_key
from turnstream_server.keys import store
from turnstream_server.keys.store import ensure_key_file
from turnstream_server.tls import read_tls


def test_missing_file_is_created_once_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "new folder" / "key"

    first, second = ensure_key_file(path), ensure_key_file(path)

    assert first == second
    assert first.startswith("tml-")
    assert len(first) > 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["key"]


def test_processes_that_create_the_file_together_get_the_same_key(tmp_path: Path):
    path = tmp_path / "key"

    with multiprocessing.get_context("fork").Pool(8) as pool:
        found = pool.map(ensure_key_file, [path] * 64, chunksize=1)

    assert len(set(found)) == 1


def test_the_first_of_two_writers_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "key"
    create = store._create

    def create_late(path: Path, secret: str) -> None:
        path.write_text("tml-of-another-process-0123456789\n")
        create(path, secret)

    monkeypatch.setattr(store, "_create", create_late)

    assert ensure_key_file(path) == "tml-of-another-process-0123456789"
    assert len([*tmp_path.iterdir()]) == 1


def test_file_without_a_key_is_an_error_that_does_not_show_it(tmp_path: Path):
    path = tmp_path / "key"
    for text in ("", "tml-short", "another-key-of-enough-characters", "tml-\u00e9"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidConfigError, match="TURNSTREAM_KEY_FILE: ") as caught:
            ensure_key_file(path)
        assert not text or text not in str(caught.value)
        assert path.read_text(encoding="utf-8") == text


def test_unusable_own_key_is_an_error_that_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("TURNSTREAM_API_KEY", "tml-hush\nhush")  # no header can carry it
    for call in (own_key, lambda: own_key("tml-hush\u00e9")):
        with pytest.raises(InvalidConfigError) as caught:
            call()
        assert "hush" not in str(caught.value)
    monkeypatch.delenv("TURNSTREAM_API_KEY")
    monkeypatch.setenv("TURNSTREAM_KEY_FILE", str(tmp_path / "none"))

    with pytest.raises(InvalidConfigError, match=r"TURNSTREAM_KEY_FILE: .*/none cannot be read"):
        own_key()


CERTIFICATES: list[tuple[Callable[[Path], object], str]] = [
    (lambda file: read_tls(file, None), "TURNSTREAM_TLS_KEY: it is not set"),
    (lambda file: read_tls(None, file), "TURNSTREAM_TLS_CERT: it is not set"),
    (lambda file: read_tls(file, file / "x"), "TURNSTREAM_TLS_KEY: .* cannot be read"),
    (lambda file: read_tls(file, file), "TURNSTREAM_TLS_CERT: .* no certificate"),
]


def test_unusable_certificates_are_errors_that_name_the_setting(tmp_path: Path):
    file = tmp_path / "file.pem"
    file.write_text("text")

    assert read_tls(None, None) is None
    for read, problem in CERTIFICATES:
        with pytest.raises(InvalidConfigError, match=problem):
            read(file)
