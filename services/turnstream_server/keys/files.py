"""The key of a service in a file, which the first start makes."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

from turnstream.errors import InvalidConfigError
from turnstream.store.client.api_keys import FILE_VARIABLE, read_key_file
from turnstream_server.keys.records import PREFIX, new_secret

_LEAST_CHARACTERS: Final = 24
"""A shorter key could be guessed."""


def ensure_key_file(path: Path) -> str:
    """Return the key in a file; a missing file is created with a new key, for its owner alone.

    The first one wins if several processes create it at the same time.

    Raises:
        InvalidConfigError: the file cannot be read or written, or has no key.
    """
    if not path.exists():
        try:
            _create(path, new_secret())
        except OSError as error:
            raise InvalidConfigError(FILE_VARIABLE, f"{path} cannot be written: {error}") from error
    secret = read_key_file(path)
    if not secret.startswith(PREFIX) or len(secret) < _LEAST_CHARACTERS:
        raise InvalidConfigError(
            FILE_VARIABLE,
            f"{path} has no key that begins with {PREFIX} and has {_LEAST_CHARACTERS} characters",
        )
    return secret


def _create(path: Path, secret: str) -> None:
    """Write a file that appears whole, unless there is one by then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(f"{secret}\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
