"""Published weights over HTTP: the server of a trainer, and downloads that are interrupted."""

from __future__ import annotations

import hashlib
import http.client
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from testkit.services.inference_servers import serving
from turnstream.errors import (
    CorruptRecordError,
    InvalidConfigError,
    RejectedError,
    ReleasedError,
    UnavailableError,
)
from turnstream.weights import CHECKSUMS, fetch_weights, write_checksums
from turnstream_server.trainer.publishing import advertised_url, serve_weights, weights_app

FILES = {
    "model.safetensors": bytes(range(256)) * 1_000,
    "config.json": b"{}",
    "shards/one.safetensors": b"nested",
}
MODEL = "model.safetensors"


class Faults:
    """An application in front of another; `faults` replace the next responses for the model.

    Attributes:
        faults: a status; "cut": half of the body and a closed connection; "flip": one bit is
            wrong; "whole": without ranges.
        asked: name and Range of every request.
    """

    def __init__(self, app: Any) -> None:
        self.faults: list[int | str] = []
        self.asked: list[tuple[str, str]] = []
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request with the next fault, if any."""
        name = scope["path"].rpartition("/")[2]
        self.asked.append((name, dict(scope["headers"]).get(b"range", b"").decode()))
        fault = self.faults.pop(0) if self.faults and name == MODEL else None
        if fault == "whole":
            scope["headers"] = [each for each in scope["headers"] if each[0] != b"range"]
        if isinstance(fault, int):
            await send({"type": "http.response.start", "status": fault, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return

        async def damaged(message: Any) -> None:
            body = message.get("body", b"")
            if body and fault == "cut":
                await send({**message, "body": body[: len(body) // 2], "more_body": True})
                raise ConnectionAbortedError
            if body and fault == "flip":
                message = {**message, "body": bytes([body[0] ^ 1]) + body[1:]}
            await send(message)

        await self._app(scope, receive, damaged)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two versions, a version that is not finished, and a secret next to them."""
    weights = tmp_path / "weights"
    for version in ("v0", "v1"):
        for name, content in FILES.items():
            path = weights / version / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content + version.encode())
        write_checksums(weights / version)
    for unfinished in (".unfinished-x", "v2"):
        (weights / unfinished).mkdir()
        (weights / unfinished / MODEL).write_bytes(b"unfinished")
    (weights / "v1" / "unlisted").write_bytes(b"secret")
    (tmp_path / "secret").write_bytes(b"secret")
    return weights


@pytest.fixture
def faults(folder: Path) -> Faults:
    return Faults(weights_app(folder))


@pytest.fixture
def url(faults: Faults) -> Iterator[str]:
    with serving(faults) as address:
        yield address


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def of_version(version: str) -> dict[str, bytes]:
    return {name: content + version.encode() for name, content in FILES.items()}


def get(url: str, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    """The response to a path as it is written, without any cleaning by a client."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request(method, path, headers={**headers, "Connection": "close"})
    return connection.getresponse()


def test_fetched_version_equals_the_published_one(url: str, faults: Faults, tmp_path: Path) -> None:
    fetched = fetch_weights(f"{url}/v1", cache=tmp_path / "cache")
    faults.asked.clear()
    again = fetch_weights(f"{url}/v1/", cache=tmp_path / "cache")

    assert contents(fetched) == of_version("v1")
    assert again == fetched
    assert faults.asked == [(CHECKSUMS, "")]
    folder = tmp_path / "a folder"
    assert fetch_weights(folder.as_uri(), cache=tmp_path) == folder


@pytest.mark.parametrize(
    "injected",
    [[503, 503], [429], ["cut"], ["cut", "cut", 502, "cut"], ["cut", "whole"], ["cut", "flip"]],
    ids=str,
)
def test_interrupted_download_is_completed(
    url: str, faults: Faults, tmp_path: Path, injected: list[int | str]
) -> None:
    faults.faults = injected

    assert contents(fetch_weights(f"{url}/v1", cache=tmp_path / "cache")) == of_version("v1")
    assert faults.faults == []


def test_download_resumes_at_the_first_missing_byte_in_another_process(
    url: str, faults: Faults, tmp_path: Path
) -> None:
    faults.faults = ["cut", *[503] * 1_000]
    with pytest.raises(UnavailableError, match=r"no byte for 0\.3 s.*503"):
        fetch_weights(f"{url}/v1", cache=tmp_path / "cache", timeout_s=0.3)
    faults.faults, faults.asked = [], []

    fetched = fetch_weights(f"{url}/v1", cache=tmp_path / "cache")

    ranges = [asked for name, asked in faults.asked if name == MODEL]
    assert ranges == ["bytes=32768-"]  # the server sends pieces of 64 KiB
    assert contents(fetched) == of_version("v1")


def test_complete_part_of_a_killed_process_is_used(
    url: str, faults: Faults, tmp_path: Path
) -> None:
    folder = fetch_weights(f"{url}/v1", cache=tmp_path / "cache")
    partial = folder.with_name(f".partial-{folder.name}")
    folder.rename(partial)
    (partial / MODEL).rename(partial / f"{MODEL}.part")

    assert contents(fetch_weights(f"{url}/v1", cache=tmp_path / "cache")) == of_version("v1")


def test_damaged_download_is_refused_and_begins_again(
    url: str, faults: Faults, tmp_path: Path
) -> None:
    faults.faults = ["flip"]
    with pytest.raises(CorruptRecordError, match=r"model\.safetensors has another SHA-256"):
        fetch_weights(f"{url}/v1", cache=tmp_path / "cache")
    refused = [path.name for path in (tmp_path / "cache").glob("[0-9a-f]*")]

    fetched = fetch_weights(f"{url}/v1", cache=tmp_path / "cache")

    assert refused == []
    assert contents(fetched) == of_version("v1")


def test_version_that_cannot_be_fetched_is_a_typed_error(
    url: str, faults: Faults, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    for version in ("v9", "v2"):
        with pytest.raises(ReleasedError, match=f"{version}.*HTTP 40"):
            fetch_weights(f"{url}/{version}", cache=cache)
    faults.faults = [403]
    with pytest.raises(RejectedError, match=r"v1.*HTTP 40"):
        fetch_weights(f"{url}/v1", cache=cache)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UnavailableError, match=r"no byte for 0\.1 s.*refused"):
        fetch_weights(f"http://127.0.0.1:{port}/v1", cache=cache, timeout_s=0.1)
    for uri in ("s3://bucket/v7", "", "v7", "http:///v7", "ftp://host/v7"):
        with pytest.raises(InvalidConfigError, match="weights_uri"):
            fetch_weights(uri, cache=cache)


def test_list_that_leads_out_of_its_folder_is_refused(
    url: str, folder: Path, tmp_path: Path
) -> None:
    zeros = "0" * 64
    lines = (f"{zeros}  ../{MODEL}", f"{zeros}  /tmp/x", f"{zeros[1:]}  {MODEL}")
    for line in (*lines, "<html>", "", "\xff"):
        (folder / "v1" / CHECKSUMS).write_text(line, encoding="latin-1")
        with pytest.raises(CorruptRecordError, match=CHECKSUMS):
            fetch_weights(f"{url}/v1", cache=tmp_path / "cache")

    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_cache_keeps_the_versions_that_were_used_last(
    url: str, folder: Path, tmp_path: Path
) -> None:
    (folder / "v0" / "config.json").rename(folder / "v2" / "config.json")
    write_checksums(folder / "v2")
    write_checksums(folder / "v0")
    cache = tmp_path / "cache"
    fetched = [fetch_weights(f"{url}/v{number}", cache=cache) for number in (0, 1, 0)]

    newest = fetch_weights(f"{url}/v2", cache=cache)

    assert set(cache.iterdir()) == {fetched[0], newest}


def test_file_has_its_digest_as_etag_and_can_be_read_in_ranges(url: str) -> None:
    content = of_version("v1")[MODEL]
    etag = f'"{hashlib.sha256(content).hexdigest()}"'

    whole = get(url, f"/v1/{MODEL}")
    part = get(url, f"/v1/{MODEL}", Range="bytes=10-19")
    beyond = get(url, f"/v1/{MODEL}", Range=f"bytes={len(content)}-")
    known = get(url, f"/v1/{MODEL}", **{"If-None-Match": etag})

    assert (whole.status, whole.headers["etag"], whole.read()) == (200, etag, content)
    assert (part.status, part.headers["etag"], part.read()) == (206, etag, content[10:20])
    assert (beyond.status, known.status, known.read()) == (416, 304, b"")
    assert get(url, f"/v1/{MODEL}", "PUT").status == 405  # it cannot be written to


def test_unlisted_path_has_no_answer(url: str) -> None:
    for path in (
        *("/v1/../../secret", "/v1/%2e%2e/%2e%2e/secret", "/../secret", "/v1//etc/passwd"),
        *("/v1/..%2f..%2fsecret", "/v1/unlisted", "/v1/", "/v1", "/", "/v1/shards"),
        *(f"/v2/{MODEL}", f"/.unfinished-x/{MODEL}", f"/v2/{CHECKSUMS}", "/v1/%00"),
    ):
        response = get(url, path)
        assert response.status == 404, path
        assert b"secret" not in response.read(), path


def test_server_of_a_trainer_stops_with_its_block_and_needs_a_usable_address(
    folder: Path, tmp_path: Path
) -> None:
    with serve_weights(folder, listen="127.0.0.1:0") as server:
        fetched = fetch_weights(f"{server.url}/v1", cache=tmp_path / "cache")
        for listen in (server.url.removeprefix("http://"), "7602", "127.0.0.1:70000"):
            with pytest.raises(InvalidConfigError, match="--weights-listen"):
                serve_weights(folder, listen=listen)

    assert contents(fetched) == of_version("v1")
    with pytest.raises(ConnectionRefusedError):
        get(server.url, f"/v1/{MODEL}")
    for address, given in (("http://0.0.0.0:7602", ""), ("http://127.0.0.1:7602", "trainer:7602")):
        with pytest.raises(InvalidConfigError, match="--weights-url"):
            advertised_url(address, given)
