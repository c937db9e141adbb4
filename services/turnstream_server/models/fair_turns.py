"""Shares of the running batch: which waiting sequence starts next, and which one pauses for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from turnstream.errors import InvalidConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of the running batch.

    Attributes:
        max_sequences: sequences that run at the same time.
        max_cached_tokens: running sequences times the longest of them, in tokens that it may reach.
            The buffers of keys and values have at most 1.6 times as many cells. Paused sequences
            keep as many tokens at most.
    """

    max_sequences: int = 64
    max_cached_tokens: int = 1 << 16

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_cached_tokens"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(name, f"{getattr(self, name)} is below 1")

    def allow(self, lengths: Sequence[int]) -> bool:
        """Return whether sequences that may reach these lengths can run together."""
        count = len(lengths)
        is_cached = count * max(lengths, default=0) <= self.max_cached_tokens
        return count <= self.max_sequences and is_cached


class Share(NamedTuple):
    """A session and its owner. Running sequences are divided among owners, then sessions."""

    owner: str = ""
    session: str = ""


ANYONE: Final = Share()
"""The share of requests without an owner."""


class Turn(NamedTuple):
    """The share whose first waiting sequence starts, and the places in `running` that pause."""

    share: Share
    paused: tuple[int, ...] = ()


def next_turn(
    waiting: Mapping[Share, int], running: Sequence[tuple[Share, int]], *, limits: BatchLimits
) -> Turn | None:
    """Return the next turn; None if no sequence starts.

    The owner with the fewest running sequences is next, and of its sessions the one with the
    fewest. If the limits do not allow its sequence, running ones of others pause for it. Another
    owner, or another session of this owner, must have two more running sequences than the one that
    starts: so each pause makes the shares more equal.

    If the pauses are not enough, a free place stays free until running sequences end, and each
    sequence starts at some time. Other owners then start sequences only in the places of larger
    shares.

    Args:
        waiting: the most tokens of the first waiting sequence of each share. Equal shares start in
            this order.
        running: share and most tokens of each running sequence. The last ones of a share pause.
        limits: bounds of the running sequences.

    >>> limits, big, small = BatchLimits(max_sequences=3), Share("a", "big"), Share("b", "small")
    >>> next_turn({big: 9, small: 9}, [(big, 9)], limits=limits).share.session
    'small'
    >>> next_turn({big: 9, small: 9}, [(big, 9)] * 3, limits=limits).paused
    (2,)
    >>> next_turn({big: 9, small: 9}, [(big, 9), (big, 9), (small, 9)], limits=limits) is None
    True
    """
    of_share = Counter(share for share, _ in running)
    of_owner = Counter(share.owner for share, _ in running)
    by_load = sorted(waiting, key=lambda share: (of_owner[share.owner], of_share[share]))
    first_of_owner = {share.owner: share for share in reversed(by_load)}
    for share in by_load:
        if share != first_of_owner[share.owner]:
            continue
        paused = _paused(share, waiting[share], running, limits=limits)
        if paused is not None and (paused or share == by_load[0]):
            return Turn(share, paused)
    return None


def _paused(
    share: Share, length: int, running: Sequence[tuple[Share, int]], *, limits: BatchLimits
) -> tuple[int, ...] | None:
    """Return the positions that pause for a sequence of a share; None if that is not enough."""
    of_share = Counter(own for own, _ in running)
    of_owner = Counter(own.owner for own, _ in running)

    def is_larger(other: Share) -> bool:
        if other.owner == share.owner:
            return of_share[other] >= of_share[share] + 2
        return of_owner[other.owner] >= of_owner[share.owner] + 2

    kept = dict(enumerate(running))
    while not limits.allow([length, *(own for _, own in kept.values())]):
        larger = filter(is_larger, of_share)
        largest = max(larger, key=lambda own: (of_owner[own.owner], of_share[own]), default=None)
        if largest is None:
            return None
        del kept[max(place for place, (own, _) in kept.items() if own == largest)]
        of_share[largest] -= 1
        of_owner[largest.owner] -= 1
    return tuple(place for place in range(len(running)) if place not in kept)
