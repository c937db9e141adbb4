"""Group ids that are used again, by a generator that was restarted. No I/O."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from turnstream.errors import ConflictError, FencedError
from turnstream.store.run.groups import Unfinished
from turnstream.types import Turn

_logger = logging.getLogger(__name__)

HALF_WRITTEN: Final = "left half-written by an earlier process"
POLL_S: Final = 1.0
"""Seconds between two attempts to adopt the samples of another writer."""


class AnyTrajectoryWriter(Protocol):
    """A trajectory writer, for threads or for asyncio."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Turns that were stored before this writer adopted the trajectory."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether it was sealed or abandoned."""
        ...

    def abandon(self, reason: str) -> object:
        """End the trajectory untrained."""
        ...


_Writer = TypeVar("_Writer", bound=AnyTrajectoryWriter)


class Reopened(NamedTuple, Generic[_Writer]):
    """The part of a group that is left to write.

    Attributes:
        unopened: samples that no generator has opened.
        adopted: sample -> writer of a sample that an earlier process opened and did not begin.
    """

    unopened: Sequence[int]
    adopted: dict[int, _Writer]


class Reopening(Generic[_Writer]):
    """The adoption of the samples that an earlier process opened.

    Args:
        group_id: name of their group.
        unfinished: its samples without an end.

    Attributes:
        pending: samples that are still to be adopted.
    """

    def __init__(self, group_id: str, unfinished: Unfinished) -> None:
        self.pending = [*unfinished.begun]
        self._group_id = group_id
        self._unopened = unfinished.unopened
        self._adopted: dict[int, _Writer] = {}
        self._left_s: dict[int, float] = {}

    @property
    def result(self) -> Reopened[_Writer]:
        """The samples to write, once nothing is pending."""
        return Reopened(self._unopened, self._adopted)

    @property
    def pause_s(self) -> float:
        """Seconds until the pending samples are worth another attempt; 0 if there are none."""
        return min(POLL_S, max((self._left_s[sample] for sample in self.pending), default=0.0))

    def skip(self, sample: int) -> None:
        """Leave a sample to its writer."""
        self.pending.remove(sample)

    def refused(self, sample: int, error: ConflictError | FencedError) -> None:
        """Wait for the end of the lease, or skip the sample if it has ended or is renewed."""
        left_s = error.retry_after_s if isinstance(error, ConflictError) else None
        if left_s is None or left_s > self._left_s.get(sample, math.inf):
            self.skip(sample)
            return
        if not self._left_s:
            _logger.info(
                "group %s belongs to another writer; its lease ends in %.0f s unless it is renewed",
                *(self._group_id, left_s),
            )
        self._left_s[sample] = left_s

    def adopted(self, sample: int, writer: _Writer) -> None:
        """Keep the writer of a sample without turns; abandon one that is half-written."""
        self.skip(sample)
        if not writer.turns:
            self._adopted[sample] = writer
            return
        writer.abandon(HALF_WRITTEN)
        _logger.warning(
            "group %s: sample %d is abandoned: an earlier process left it with %d turns, no seal",
            *(self._group_id, sample, len(writer.turns)),
        )
