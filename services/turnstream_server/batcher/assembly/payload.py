"""The payload that a plan names: fetched from the store, decoded and checked."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from redis import exceptions as redis_errors

from turnstream.batching.merge.plan import TrajectoryPlan
from turnstream.errors import CorruptRecordError, RecordError
from turnstream.records.turns import decode_turn, read_turns
from turnstream.store.client import keys
from turnstream.store.client.connection import Link
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import pack
from turnstream.types import StoredTurn, StoredTurns, TrajectoryKey

SLICE_TRAJECTORIES: Final = 128
"""Trajectories fetched in one go: it bounds the memory of a reply."""


class Damage(NamedTuple):
    """A trajectory whose payload is not what was sealed, and in which way."""

    key: TrajectoryKey
    reason: str


class DamagedPayloadError(CorruptRecordError):
    """Payload that a plan names is damaged, missing, or not what was sealed."""

    def __init__(self, damages: tuple[Damage, ...]) -> None:
        super().__init__(damages)
        self.damages = damages

    def __str__(self) -> str:
        named = (f"{key.readable_name}: {reason}" for key, reason in self.damages)
        return "damaged payload of " + "; ".join(named)


class UnplannableError(DamagedPayloadError):
    """Trajectories of which no plan can be made, though their events were accepted."""

    def __str__(self) -> str:
        return "; ".join(f"{key.readable_name}: {reason}" for key, reason in self.damages)


Payload = dict[TrajectoryKey, list[StoredTurn]]
"""The turns of trajectories, in order."""


class PayloadReader:
    """Reads payload from the store; each thread uses a connection of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[Link] = []  # appending and popping are atomic

    def read(self, plans: Sequence[TrajectoryPlan], *, run: str) -> Payload:
        """Return the checked turns of these trajectories, with the checksums that were sealed.

        A DamagedPayloadError names every trajectory without them.
        """
        turns: Payload = {}
        damages: list[Damage] = []
        for plan, records in zip(plans, self._fetch(plans, run=run), strict=True):
            try:
                turns[plan.key] = _decode(records, plan=plan)
            except RecordError as error:
                damages.append(Damage(plan.key, str(error)))
        if damages:
            raise DamagedPayloadError(tuple(damages))
        return turns

    def read_columns(self, plans: Sequence[TrajectoryPlan], *, run: str) -> StoredTurns:
        """Return the turns of `read`, in order, without its checks of checksums and values.

        `assemble_rows` checks them. A RecordError does not name the damaged trajectory.
        """
        records = itertools.chain.from_iterable(self._fetch(plans, run=run))
        return StoredTurns.of_values(read_turns([*records]))

    def close(self) -> None:
        """Disconnect all idle connections. Safe in several threads at once."""
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _fetch(self, plans: Sequence[TrajectoryPlan], *, run: str) -> Iterator[list[bytes]]:
        for start in range(0, len(plans), SLICE_TRAJECTORIES):
            words = [_words(plan, run=run) for plan in plans[start : start + SLICE_TRAJECTORIES]]
            data = pack(words)
            with translating():
                try:
                    replies = self._exchange(self._link(), data, len(words))
                except redis_errors.ConnectionError:
                    # After a restart of the server every idle connection is stale.
                    replies = self._exchange(Link(self._url), data, len(words))
                for reply in replies:
                    if isinstance(reply, redis_errors.RedisError):
                        raise reply
                    yield [fields[1] for _, fields in reply]

    def _link(self) -> Link:
        try:
            return self._idle.pop()
        except IndexError:
            return Link(self._url)

    def _exchange(self, link: Link, data: bytes, num_replies: int) -> list[Any]:
        replies = link.exchange(data, num_replies)
        self._idle.append(link)
        return replies


def _words(plan: TrajectoryPlan, *, run: str) -> tuple[str, ...]:
    stream = keys.trajectory_keys(run, keys.trajectory_id(plan.key)).turns
    return ("XRANGE", stream, "0-1", f"0-{len(plan.payload_crcs)}")


def _decode(records: Sequence[bytes], *, plan: TrajectoryPlan) -> list[StoredTurn]:
    turns = [*map(decode_turn, records)]
    found = tuple([turn.payload_crc for turn in turns])
    if found != plan.payload_crcs:
        raise CorruptRecordError(_difference(found, plan.payload_crcs))
    for turn in turns:
        _check_values(turn)
    if plan.has_logprobs:
        for turn in [turns[index] for row in plan.sequences for index in row.turns]:
            if turn.logprobs is None and turn.shape.num_trained_tokens:
                raise CorruptRecordError(f"turn {turn.index} lacks the logprobs that were sealed")
    return turns


def _check_values(turn: StoredTurn) -> None:
    """Refuse values that would make the gradient of a whole batch non-finite."""
    for name, values in (("logprobs", turn.logprobs), ("rewards", turn.rewards)):
        if values is not None and not np.isfinite(values).all():
            raise CorruptRecordError(f"turn {turn.index} has {name} that are not finite")
    if turn.token_ids.min(initial=0) < 0:
        raise CorruptRecordError(f"turn {turn.index} has the token id {turn.token_ids.min()}")


def _difference(found: Sequence[int], sealed: Sequence[int]) -> str:
    if len(found) != len(sealed):
        return f"{len(found)} turns are stored, {len(sealed)} were sealed"
    index = next(i for i, pair in enumerate(zip(found, sealed, strict=True)) if pair[0] != pair[1])
    return f"turn {index} has another checksum than was sealed"
