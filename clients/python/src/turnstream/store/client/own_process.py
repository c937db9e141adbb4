"""Objects with threads or connections that belong to one process."""

from __future__ import annotations

import os
from typing import NoReturn

from turnstream.errors import RejectedError


class OwnProcess:
    """The process that made `what`, which alone may use it: threads do not survive `fork`.

    The `remedy` tells how another process gets one of its own.
    """

    __slots__ = ("_pid", "_remedy", "_what")

    def __init__(self, what: str, *, remedy: str) -> None:
        self._pid = os.getpid()
        self._what = what
        self._remedy = remedy

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the object."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise RejectedError in a process that was forked later."""
        if not self.is_here:
            raise RejectedError(
                f"{self._what} belongs to process {self._pid}, and cannot be used in process "
                f"{os.getpid()}, which was forked from it: {self._remedy}"
            )

    def refuse_pickle(self) -> NoReturn:
        """Raise the TypeError of an object that cannot be pickled."""
        raise TypeError(f"{self._what} cannot be pickled: {self._remedy}")
