"""Packages that only some installations have: the extras of a distribution."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from turnstream.errors import MissingExtraError


@contextlib.contextmanager
def from_extra(extra: str, *, needed_by: str, distribution: str = "turnstream") -> Iterator[None]:
    """Import packages of an extra inside the block.

    Args:
        extra: name of the extra, such as "worker".
        needed_by: the call, module or option that imports them.
        distribution: the one that has the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("turnstream", ""):
            raise
        raise MissingExtraError(needed_by, package, extra, distribution) from error
