"""Which settings of a server lose what it has acknowledged, beyond what its mode says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

SETTINGS: Final = ("appendfsync", "no-appendfsync-on-rewrite")
"""What is asked for."""

SYNCS: Final = ("everysec", "always")
"""Of `appendfsync`: "no" leaves the sync to the system, which takes half a minute or longer."""


class Unsafe(NamedTuple):
    """A setting of a server, and a value that it must have instead."""

    setting: str
    value: str
    needed: str

    @property
    def message(self) -> str:
        """For people."""
        return f"has {self.value!r}; needed is {self.needed!r}"


def unsafe_setting(found: Mapping[str, str], *, syncs: Collection[str] = SYNCS) -> Unsafe | None:
    """The first setting that loses what was acknowledged; None where none is known.

    With `no-appendfsync-on-rewrite`, nothing is synced while the file is rewritten, however long
    that takes, whatever `appendfsync` says.

    >>> unsafe_setting({"appendfsync": "everysec", "no-appendfsync-on-rewrite": "yes"})
    Unsafe(setting='no-appendfsync-on-rewrite', value='yes', needed='no')
    >>> unsafe_setting({"appendfsync": "always"}) is None
    True

    Args:
        found: the settings that the server told.
        syncs: values of `appendfsync` that are good enough; the first is asked for.
    """
    first = next(iter(syncs))
    sync, pauses = (found.get(name) for name in SETTINGS)
    if sync is not None and sync not in syncs:
        return Unsafe("appendfsync", sync, first)
    if pauses is not None and pauses != "no":
        return Unsafe("no-appendfsync-on-rewrite", pauses, "no")
    return None
