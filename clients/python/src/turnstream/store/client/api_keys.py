"""The API key and the certificates of this program, from its arguments or its environment."""

from __future__ import annotations

import functools
import os
import ssl
from pathlib import Path
from typing import Final

from turnstream.errors import InvalidConfigError

KEY_VARIABLE: Final = "TURNSTREAM_API_KEY"
FILE_VARIABLE: Final = "TURNSTREAM_KEY_FILE"
CA_VARIABLE: Final = "TURNSTREAM_TLS_CA"

METADATA: Final = "x-api-key"
"""Name of the metadata of a gRPC call, and in lower case of the header of an HTTP request."""


def own_key(given: str | None = None) -> str:
    """Return the given key, else that of the environment or of its file; "" for none."""
    if given is not None:
        return _checked(given, field="api_key")
    if key := os.environ.get(KEY_VARIABLE):
        return _checked(key, field=KEY_VARIABLE)
    path = os.environ.get(FILE_VARIABLE)
    return read_key_file(Path(path)) if path else ""


def read_key_file(path: Path) -> str:
    """Return the key in a file; InvalidConfigError if there is none."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(FILE_VARIABLE, f"{path} cannot be read: {error}") from error
    if not text:
        raise InvalidConfigError(FILE_VARIABLE, f"{path} is empty, expected a key")
    return _checked(text, field=FILE_VARIABLE)


def root_certificates() -> bytes | None:
    """Return the certificates that servers are checked against, as PEM.

    They are those of the file that TURNSTREAM_TLS_CA names, else those of the system. None stands
    for those that come with gRPC: the system has no file of certificates.
    """
    path = os.environ.get(CA_VARIABLE)
    if not path:
        found = ssl.get_default_verify_paths().cafile
        return None if found is None else Path(found).read_bytes()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfigError(CA_VARIABLE, f"{path} cannot be read: {error}") from error


@functools.lru_cache(maxsize=4)  # those of the system take 0.2 s to read
def trusting_context(certificates: bytes | None) -> ssl.SSLContext:
    """Return the context of an HTTP client that trusts these certificates; None: the system's."""
    if certificates is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cadata=certificates.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidConfigError(CA_VARIABLE, f"has no certificates: {error}") from error


def _checked(key: str, *, field: str) -> str:
    """Return a key that metadata can carry. The error does not show it."""
    if not key.isascii() or not key.isprintable() or key != key.strip():
        raise InvalidConfigError(field, "the key is not printable ASCII without spaces around it")
    return key
