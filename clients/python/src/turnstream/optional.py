"""Packages that only some installations have: the extras of the distribution."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from turnstream.errors import MissingExtraError


@contextlib.contextmanager
def from_extra(extra: str, *, needed_by: str) -> Iterator[None]:
    """Import packages of an extra inside the block.

    Args:
        extra: name of the extra, such as "worker".
        needed_by: the call or module that imports them.

    Raises:
        MissingExtraError: one of them is not installed; has the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("turnstream", ""):
            raise
        raise MissingExtraError(needed_by, error.name or "", extra) from error
