"""A group being written, for threads and for asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from turnstream.errors import ConflictError
from turnstream.generator.async_sender import AsyncSender
from turnstream.generator.bases import GroupWriterBase
from turnstream.generator.lanes import Lane
from turnstream.generator.outbox import Outbox
from turnstream.generator.reopening import Reopened
from turnstream.generator.sender import Sender
from turnstream.generator.trajectory_writers import AsyncTrajectoryWriter, TrajectoryWriter
from turnstream.types import GroupOpened, TrajectoryKey


class GroupWriter(GroupWriterBase[Sender, TrajectoryWriter]):
    """A group being written; a context manager. Made by `Publisher.group`.

    Args:
        sender: of the publisher.
        outbox: of the publisher.
        group: as it is opened.
        make_writer: return the writer of an open trajectory.
        reopen: finds the unfinished samples of a group that may exist; None if it must be new.
    """

    _entered_by = "`with`"

    def __init__(
        self,
        sender: Sender,
        outbox: Outbox,
        group: GroupOpened,
        *,
        make_writer: Callable[[GroupOpened, TrajectoryKey, Lane | None], TrajectoryWriter],
        reopen: Callable[[GroupOpened], Reopened[TrajectoryWriter]] | None,
    ) -> None:
        super().__init__(sender, outbox, group, make_writer=make_writer)
        self._reopen = reopen

    def __enter__(self) -> Self:
        if self._reopen is None:
            self._open(range(self._group.num_samples))
            return self
        try:
            self._open(self._resume(self._reopen(self._group)))
        except ConflictError:  # another generator was faster, or the sizes differ: raised again
            self._open(self._resume(self._reopen(self._group)))
        return self

    def _open(self, samples: Sequence[int]) -> None:
        opened = self._sender.receipt()
        self._ask(opened, samples)
        try:
            opened.result()
        except BaseException as error:
            self._give_up(error)
            raise

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._give_up(error)


class AsyncGroupWriter(GroupWriterBase[AsyncSender, AsyncTrajectoryWriter]):
    """A group being written; made by `AsyncPublisher.group`. See `GroupWriter`."""

    _entered_by = "`async with`"

    def __init__(
        self,
        sender: AsyncSender,
        outbox: Outbox,
        group: GroupOpened,
        *,
        make_writer: Callable[[GroupOpened, TrajectoryKey, Lane | None], AsyncTrajectoryWriter],
        reopen: Callable[[GroupOpened], Awaitable[Reopened[AsyncTrajectoryWriter]]] | None,
    ) -> None:
        super().__init__(sender, outbox, group, make_writer=make_writer)
        self._reopen = reopen

    async def __aenter__(self) -> Self:
        if self._reopen is None:
            await self._open(range(self._group.num_samples))
            return self
        try:
            await self._open(self._resume(await self._reopen(self._group)))
        except ConflictError:  # another generator was faster, or the sizes differ: raised again
            await self._open(self._resume(await self._reopen(self._group)))
        return self

    async def _open(self, samples: Sequence[int]) -> None:
        opened = self._sender.receipt()
        self._ask(opened, samples)
        try:
            await opened
        except BaseException as error:
            self._give_up(error)
            raise

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._give_up(error)
