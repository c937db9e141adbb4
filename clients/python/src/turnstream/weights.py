"""Weights by their URI: a folder on this machine, or one that is fetched over HTTP.

A version is a folder of files. Over HTTP its file `SHA256SUMS` lists them, in the format of the
program `sha256sum`. A fetched version is checked against this list. It lies in the cache under
the digest of the list, so no other version can be taken for it.

    newest = run.wait_for_version()
    folder = turnstream.fetch_weights(newest.weights_uri, cache="/tmp/weights")
    model = AutoModelForCausalLM.from_pretrained(folder)
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final
from urllib.parse import quote, urlsplit
from urllib.request import url2pathname

from turnstream.errors import (
    AccessDeniedError,
    CorruptRecordError,
    InvalidConfigError,
    RejectedError,
    ReleasedError,
    UnavailableError,
    UnknownKeyError,
)
from turnstream.store.client.api_keys import (
    METADATA,
    own_key,
    root_certificates,
    trusting_context,
)
from turnstream.store.client.backoff import pause_after

CHECKSUMS: Final = "SHA256SUMS"
"""Name of the file that lists the other files of a folder."""

_CHUNK_BYTES: Final = 1 << 20
_READ_TIMEOUT_S: Final = 30.0
_PARTIAL: Final = ".partial-"
_NAME: Final = re.compile(r"[0-9a-f]{64}")
_LINE: Final = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_GONE: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
_TRANSIENT: Final = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


def fetch_weights(
    uri: str,
    *,
    cache: str | os.PathLike[str],
    timeout_s: float = 60.0,
    num_kept: int = 2,
    api_key: str | None = None,
) -> Path:
    """Return the local folder of the weights at a URI.

    The folder of a `file://` URI is returned as it is. An `http(s)://` version is downloaded into
    `cache`, unless it is there. An interrupted download resumes, also in another process. A
    folder that is returned is complete, and each of its files has the announced SHA-256.

    Args:
        uri: the `weights_uri` of an announced version.
        cache: a folder of this process alone. It is created if it does not exist.
        timeout_s: longest time without a new byte. Failed requests are repeated until then.
        num_kept: versions that stay in the cache, this one included.
        api_key: key for a server that asks for one, and for no other; None takes that of
            TURNSTREAM_API_KEY, else of the file TURNSTREAM_KEY_FILE.

    Raises:
        InvalidConfigError: `weights_uri` has another scheme than file, http or https.
        UnknownKeyError: the server asks for a key, and there is none, or it is not accepted.
        AccessDeniedError: the key may not read the run.
        UnavailableError: no byte came for `timeout_s`. The next call resumes.
        ReleasedError: the server has no such version, or it has removed it.
        RejectedError: the server refused the request.
        CorruptRecordError: a file differs from its checksum, or the list is damaged.
    """
    parsed = urlsplit(uri)
    if parsed.scheme == "file":
        return Path(url2pathname(parsed.path))
    if parsed.scheme not in ("http", "https") or not parsed.netloc:
        message = f"{uri!r} has none of the schemes file, http and https"
        raise InvalidConfigError("weights_uri", message)
    key = own_key(api_key)
    download = _Download(uri.rstrip("/"), Path(cache), timeout_s=timeout_s, api_key=key)
    folder = download.run()
    _remove_older(Path(cache), kept=folder, num_kept=num_kept)
    return folder


def write_checksums(folder: Path) -> None:
    """Write the list `SHA256SUMS` of a complete folder. `fetch_weights` then accepts it over HTTP.

    Every web server can serve the folder. `sha256sum --check SHA256SUMS` checks it by hand.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    lines = [f"{_digest(path)}  {path.relative_to(folder).as_posix()}\n" for path in paths]
    unfinished = folder / f"{CHECKSUMS}.unfinished"
    unfinished.write_text("".join(lines), encoding="utf-8")
    unfinished.replace(folder / CHECKSUMS)


def parse_checksums(text: str) -> dict[str, str]:
    r"""Return the SHA-256 of each file, by its relative path.

    >>> parse_checksums(f"{'0' * 64}  model.safetensors\n")["model.safetensors"][:4]
    '0000'

    Raises:
        CorruptRecordError: a line has another format, or its path leads out of the folder.
    """
    digests: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None or not _is_inside(match[2]):
            raise CorruptRecordError(f"{CHECKSUMS} has the line {line!r}")
        digests[match[2]] = match[1]
    if not digests:
        raise CorruptRecordError(f"{CHECKSUMS} names no file")
    return digests


def _is_inside(name: str) -> bool:
    r"""Return whether a path stays in its folder, on every system.

    >>> [_is_inside(name) for name in ("a/b.json", "../b", "/b", "a//b", "a\\b", "c:b")]
    [True, False, False, False, False, False]
    """
    parts = PurePosixPath(name).parts
    is_plain = not re.search(r"[\\:\x00-\x1f]", name) and name == "/".join(parts)
    return is_plain and not {"/", "..", ".", CHECKSUMS}.intersection(parts)


class _TransientError(Exception):
    """A failure after which the same request may succeed."""


class _BeyondEndError(_TransientError):
    """The part on disk is as long as the whole file, or longer."""


class _Download:
    """One version on its way into the cache."""

    def __init__(self, uri: str, cache: Path, *, timeout_s: float, api_key: str = "") -> None:
        self._uri = uri
        self._api_key = api_key
        self._is_asked_for_key = False
        self._tls = trusting_context(root_certificates()) if uri.startswith("https") else None
        self._cache = cache
        self._timeout_s = timeout_s
        self._last_byte_s = time.monotonic()
        self._num_failures = 0
        self._has_started_over = False

    def run(self) -> Path:
        """Return the complete folder; repeat failed requests until `timeout_s` without a byte."""
        while True:
            try:
                return self._attempt()
            except _TransientError as failure:
                self._num_failures += 1
                pause_s = pause_after(self._num_failures)
                if time.monotonic() + pause_s > self._last_byte_s + self._timeout_s:
                    message = f"{self._uri}: no byte for {self._timeout_s:g} s: {failure}"
                    raise UnavailableError(message) from failure
                time.sleep(pause_s)

    def _attempt(self) -> Path:
        listed = self._list()
        target = self._cache / hashlib.sha256(listed).hexdigest()
        if target.is_dir():
            os.utime(target)  # the folders that were used last are kept
            return target
        partial = self._cache / f"{_PARTIAL}{target.name}"
        for name, digest in parse_checksums(_text(listed)).items():
            self._complete(partial / name, name, digest)
        (partial / CHECKSUMS).write_bytes(listed)
        partial.rename(target)
        return target

    def _list(self) -> bytes:
        with self._open(CHECKSUMS) as response:
            return b"".join(_chunks(response))

    def _complete(self, target: Path, name: str, digest: str) -> None:
        """Download the missing part of a file, and give it its name once it is verified."""
        if target.is_file():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        with part.open("ab") as written:
            resumed_at = written.tell()
            with suppress(_BeyondEndError):  # nothing is missing, or the part is damaged
                self._append(written, name)
            os.fsync(written.fileno())
        if _digest(part) == digest:
            part.rename(target)
            return
        part.unlink()
        if not resumed_at or self._has_started_over:
            raise CorruptRecordError(f"{self._uri}/{name} has another SHA-256 than {digest}")
        self._has_started_over = True
        raise _TransientError(f"{name} differs after it was resumed at byte {resumed_at:,}")

    def _append(self, written: BinaryIO, name: str) -> None:
        """Append the bytes after those that are there; a server without ranges sends all again."""
        with self._open(name, start=written.tell()) as response:
            if response.status != HTTPStatus.PARTIAL_CONTENT:
                written.truncate(0)
            missing = response.length or 0
            for chunk in _chunks(response):
                written.write(chunk)
                missing -= len(chunk)
                self._last_byte_s, self._num_failures = time.monotonic(), 0
        if missing > 0:
            raise _TransientError(f"{name} ended {missing:,} bytes early")

    def _open(self, name: str, *, start: int = 0) -> http.client.HTTPResponse:
        """Return the response to a GET from byte `start` on. Failed requests become errors."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        url = f"{self._uri}/{quote(name)}"  # http or https
        request = urllib.request.Request(url, headers=headers)  # noqa: S310
        if self._is_asked_for_key:  # no other server gets it, also not by a redirect
            request.add_unredirected_header(METADATA, self._api_key)
        try:
            return urllib.request.urlopen(  # noqa: S310
                request, timeout=_READ_TIMEOUT_S, context=self._tls
            )
        except urllib.error.HTTPError as error:
            with error:
                is_redirected = error.url != url
                if error.code != HTTPStatus.UNAUTHORIZED or is_redirected or not self._may_ask():
                    raise _error_of(error, start=start) from error
            return self._open(name, start=start)
        except (OSError, http.client.HTTPException) as error:
            raise _TransientError(f"{type(error).__name__}: {error}") from error

    def _may_ask(self) -> bool:
        """Return whether the same request may be sent with the key, once; further ones have it."""
        is_first = bool(self._api_key) and not self._is_asked_for_key
        self._is_asked_for_key = self._is_asked_for_key or is_first
        return is_first


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the body, which may end early; _TransientError if the connection fails."""
    try:
        while chunk := response.read(_CHUNK_BYTES):
            yield chunk
    except http.client.IncompleteRead as error:
        yield error.partial
    except (OSError, http.client.HTTPException) as error:
        raise _TransientError(f"{type(error).__name__}: {error}") from error


def _error_of(error: urllib.error.HTTPError, *, start: int) -> Exception:
    """Return the error for a status that is no success."""
    said = f"{error.url}: HTTP {error.code} {error.reason}"
    if error.code in _GONE:
        return ReleasedError(f"{said}: the server has no such version, or has removed it")
    if start and error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return _BeyondEndError(said)
    if error.code == HTTPStatus.UNAUTHORIZED:
        return UnknownKeyError(f"{said}: send a key of the run in TURNSTREAM_API_KEY")
    if error.code == HTTPStatus.FORBIDDEN:
        return AccessDeniedError(said)
    if error.code in _TRANSIENT or error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return _TransientError(said)
    return RejectedError(said)


def _text(listed: bytes) -> str:
    try:
        return listed.decode()
    except UnicodeDecodeError as error:
        raise CorruptRecordError(f"{CHECKSUMS} is not UTF-8: {error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_older(cache: Path, *, kept: Path, num_kept: int) -> None:
    """Remove the versions that were used longest ago, and downloads that will not resume."""
    for partial in cache.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)
    others = [path for path in cache.iterdir() if path != kept and _NAME.fullmatch(path.name)]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in others[max(0, num_kept - 1) :]:
        shutil.rmtree(path, ignore_errors=True)
