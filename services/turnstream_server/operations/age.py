"""Files encrypted for the owners of public keys, in the format of age (https://age-encryption.org)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import pyrage

from turnstream.errors import BatchingError

SUFFIX: Final = ".age"
"""The end of the name of an encrypted file."""

_pyrage: Any = pyrage  # it ships no types


def check_recipients(recipients: Sequence[str]) -> None:
    """Raise BatchingError for a text that is no public key, with its place.

    >>> check_recipients(["age1x"])
    Traceback (most recent call last):
        ...
    turnstream.errors.BatchingError: age_encryption_recipients, 0: 'age1x' is no public key of age \
or SSH: invalid Bech32 encoding
    """
    for place, text in enumerate(recipients):
        try:
            _recipient(text)
        except cast("type[Exception]", _pyrage.RecipientError) as error:
            message = f"{text!r} is no public key of age or SSH: {error}"
            raise BatchingError(f"age_encryption_recipients, {place}: {message}") from error


def encrypt_folder(folder: Path, recipients: Sequence[str]) -> None:
    """Replace every file of a folder by `<name>.age`, which each of the recipients can decrypt."""
    keys = [_recipient(each) for each in recipients]
    for path in [each for each in folder.rglob("*") if each.is_file()]:
        _pyrage.encrypt_file(str(path), f"{path}{SUFFIX}", keys)
        path.unlink()


def _recipient(text: str) -> Any:
    kind = _pyrage.ssh if text.startswith("ssh-") else _pyrage.x25519
    return kind.Recipient.from_str(text)
