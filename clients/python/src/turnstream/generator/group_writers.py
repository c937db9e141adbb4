"""A group being written, for threads and for asyncio."""

from __future__ import annotations

from typing import Self

from turnstream.generator.async_sender import AsyncSender
from turnstream.generator.bases import GroupWriterBase
from turnstream.generator.sender import Sender
from turnstream.generator.trajectory_writers import AsyncTrajectoryWriter, TrajectoryWriter
from turnstream.generator.writers import WriterState


class GroupWriter(GroupWriterBase[Sender, TrajectoryWriter]):
    """A group being written; a context manager. Made by `Publisher.group`."""

    _entered_by = "`with`"

    def __enter__(self) -> Self:
        opened = self._sender.receipt()
        self._ask(opened)
        try:
            opened.result()
        except BaseException as error:
            self._give_up(error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._give_up(error)

    def _writer(self, state: WriterState) -> TrajectoryWriter:
        return TrajectoryWriter(self._sender, state)


class AsyncGroupWriter(GroupWriterBase[AsyncSender, AsyncTrajectoryWriter]):
    """A group being written; made by `AsyncPublisher.group`. See `GroupWriter`."""

    _entered_by = "`async with`"

    async def __aenter__(self) -> Self:
        opened = self._sender.receipt()
        self._ask(opened)
        try:
            await opened
        except BaseException as error:
            self._give_up(error)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._give_up(error)

    def _writer(self, state: WriterState) -> AsyncTrajectoryWriter:
        return AsyncTrajectoryWriter(self._sender, state)
