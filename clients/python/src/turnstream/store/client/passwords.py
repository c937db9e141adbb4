"""The password of a store, from a file: it is in no environment and on no command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

from turnstream.errors import StoreUnavailableError

FILE_VARIABLE: Final = "TURNSTREAM_REDIS_PASSWORD_FILE"


def with_own_password(url: str) -> str:
    """Return the URL of a store with the password of the file that the variable names, if any."""
    path = os.environ.get(FILE_VARIABLE)
    if not path or url.startswith("http"):
        return url
    return with_password_of(Path(path), url=url)


def with_password_of(path: Path, *, url: str) -> str:
    """Return the URL of a store with the password of a file, unless the URL has one.

    The first start of a store may write the file: a missing one is a StoreUnavailableError, for
    which a service waits.
    """
    try:
        password = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreUnavailableError(f"{FILE_VARIABLE}={path} cannot be read: {error}") from error
    if not password:
        raise StoreUnavailableError(f"{FILE_VARIABLE}={path} is empty")
    return with_password(url, password)


def with_password(url: str, password: str) -> str:
    """Return the URL of a store with a password, unless it has one.

    >>> with_password("redis://batcher@store:6379/0", "a/b")
    'redis://batcher:a%2Fb@store:6379/0'
    >>> with_password("redis://batcher:own@store:6379", "a/b")
    'redis://batcher:own@store:6379'
    """
    parts = urlsplit(url)
    if parts.password is not None or "password=" in parts.query:
        return url
    user, _, address = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{address}").geturl()
