"""The publisher and the trajectory writer of the SDK, for the requests of HTTP clients.

An admission never waits here, and a write returns its receipt at once, so that the writes of one
request travel together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from turnstream.errors import FencedError, StoreUnavailableError, TurnstreamError
from turnstream.generator import AsyncPublisher, AsyncReceipt, AsyncTrajectoryWriter
from turnstream.generator.encode.checks import with_checked_extras
from turnstream.generator.encode.encoder import AdoptedTurn
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.writes import TrajectoryQueue
from turnstream.generator.transport.sender import Sender
from turnstream.types import DeclaredColumn, GroupOpened, TrajectoryKey
from turnstream_server.gateway.rest.ingest.writes import Seal, WrittenTurn

STORE_TIMEOUT_S: Final = 5.0
"""Time for which a store may be away or full before a request fails; its client then repeats it."""

_MAX_KEPT_BYTES: Final = 16 << 20
"""Bytes that each of many publishers keeps for a restart of the store."""

_DROPPED: Final = "the gateway has dropped it: its client was silent, or too many others are open"


class IngestWriter(AsyncTrajectoryWriter):
    """The writer of one open trajectory.

    Attributes:
        num_turns: turns so far, stored ones of an adopted trajectory included.
        num_bytes: bytes of their tokens, which are kept to recognise later prompts.
    """

    def __init__(
        self,
        sender: Sender[AsyncReceipt],
        outbox: Outbox,
        group: GroupOpened,
        key: TrajectoryKey,
        queue: TrajectoryQueue | None = None,
        stored: Sequence[AdoptedTurn] = (),
    ) -> None:
        super().__init__(sender, outbox, group, key, queue, stored)
        self.num_turns = len(stored)
        self.num_bytes = sum(4 * each.stored.shape.num_tokens for each in stored)
        self._turns = ()  # they are in the draft

    @property
    def num_samples(self) -> int:
        """Return the size of its group."""
        return self._group.num_samples

    @property
    def error(self) -> TurnstreamError | None:
        """Return why it takes no writes any more; None while it does."""
        return None if self._queue is None else self._queue.error

    async def add(self, written: WrittenTurn, *, is_last: bool = False) -> AsyncReceipt:
        """Send the next turn, whose values are checked; return its receipt.

        The tokens of the last turn are not kept.

        Raises:
            InvalidTurnError: an extra column is wrong, or the record is too large.
            RejectedError: the trajectory has ended.
            TurnstreamError: the error of an earlier write of this trajectory.
        """
        columns = await self._sender.learn_columns()
        turn = with_checked_extras(written.turn, _shaped(written.extras, columns), columns)
        receipt = self._sender.receipt()
        async with self._order:
            queue = await self._open()
            if not (has_capacity := self._has_capacity(turn))():
                await self._sender.wait_for_capacity(has_capacity, timeout_s=STORE_TIMEOUT_S)
            made = (self._drafted.add_last if is_last else self._drafted.add)(turn)
            self._sender.put(lambda: self._outbox.append(queue, made, receipt))
        self.num_turns += 1
        self.num_bytes += 4 * (len(turn.prompt_ids) + len(turn.response_ids))
        return receipt

    async def finish(self, seal: Seal) -> AsyncReceipt:
        """End the trajectory; return the receipt of the end. Errors as of `add`."""
        end = self._sender.loop_receipt()
        async with self._order:
            queue = await self._open()
            made = self._drafted.seal(**seal.fields)
            self._sender.put(lambda: self._outbox.seal(queue, made, end=end))
            self._has_ended = True
        return end

    def drop(self) -> None:
        """Stop to renew the lease, without an end. No write may be on its way."""
        queue = self._queue
        if queue is None or queue.error is not None or self._has_ended:
            return
        with contextlib.suppress(StoreUnavailableError):  # the publisher is closed
            self._sender.put(lambda: self._outbox.tracker.end(queue, FencedError(_DROPPED)))


class IngestPublisher(AsyncPublisher):
    """The publisher of one writer name in one run.

    Args:
        url: address of the store.
        run: id of the run.
        writer: name of the writer.
    """

    _writer_kind = IngestWriter

    def __init__(self, url: str, run: str, *, writer: str) -> None:
        super().__init__(
            url,
            run,
            writer=writer,
            timeout_s=STORE_TIMEOUT_S,
            admission_timeout_s=0,
            max_kept_bytes=_MAX_KEPT_BYTES,
        )

    @property
    def run(self) -> str:
        """Return the id of the run."""
        return self._outbox.run

    @property
    def writer(self) -> str:
        """Return the name of the writer, as leases have it."""
        return self._outbox.writer

    def opened(self, group: GroupOpened, epochs: Mapping[TrajectoryKey, int]) -> list[IngestWriter]:
        """Return the writers of trajectories that the store has opened with these epochs."""
        queues = self._sender.put(
            lambda: self._outbox.admissions.begin_opened(group, epochs, now_s=time.monotonic())
        )
        return [
            IngestWriter(self._sender, self._outbox, group, queue.key, queue) for queue in queues
        ]

    async def adopt_key(self, key: TrajectoryKey) -> IngestWriter:
        """Return the writer of an open trajectory; errors as of `Publisher.adopt`."""
        writer = await self._adopt(key)
        assert isinstance(writer, IngestWriter)
        return writer

    async def columns(self) -> tuple[DeclaredColumn, ...]:
        """Return the extra columns that the run declares."""
        return await self._sender.learn_columns()


def _shaped(
    extras: Mapping[str, Any] | None, columns: Sequence[DeclaredColumn]
) -> Mapping[str, Any] | None:
    """Return extra columns with flat arrays in the shapes of their values.

    A column of an Arrow stream is a flat list. An array that does not fit is left to the checks.
    """
    if not extras:
        return extras
    shapes = {column.name: column.shape for column in columns}

    def shaped(name: str, values: Any) -> Any:
        shape = shapes.get(name, ())
        is_flat = isinstance(values, np.ndarray) and values.ndim == 1
        if not shape or not is_flat or len(values) % int(np.prod(shape)):
            return values
        return values.reshape(-1, *shape)

    return {name: shaped(name, values) for name, values in extras.items()}
