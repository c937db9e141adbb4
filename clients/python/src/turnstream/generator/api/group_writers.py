"""A group being written, for threads and for asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from turnstream.errors import ConflictError, RejectedError
from turnstream.generator.api.sessions import (
    AgentSession,
    AgentSessionBase,
    AsyncAgentSession,
    SessionMaker,
)
from turnstream.generator.api.trajectory_core import (
    TrajectoryWriterBase,
    reason_of,
    warn_unsealed,
)
from turnstream.generator.api.trajectory_writers import AsyncTrajectoryWriter, TrajectoryWriter
from turnstream.generator.api.work import HALF_WRITTEN, Reopened
from turnstream.generator.encode.group_checks import checked_key
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.writes import TrajectoryQueue
from turnstream.generator.transport.sender import Sender
from turnstream.generator.transport.thread_sender import ThreadSender
from turnstream.types import GroupOpened, TrajectoryKey

_NOT_STARTED: Final = "never started"

_Sender = TypeVar("_Sender", bound=Sender[Any])
_Writer = TypeVar("_Writer", bound=TrajectoryWriterBase[Any, Any])
_Session = TypeVar("_Session", bound=AgentSessionBase)


class GroupWriterBase(Generic[_Sender, _Writer]):
    """A group being written, with a writer per sample.

    `make_writer` returns the writer of an open trajectory. `reopen` finds the unfinished samples of
    a group that may exist; it is None if the group must be new. `sessions` makes those of agents.
    """

    _entered_by: ClassVar[str]

    def __init__(
        self,
        sender: _Sender,
        outbox: Outbox,
        group: GroupOpened,
        *,
        make_writer: Callable[[GroupOpened, TrajectoryKey, TrajectoryQueue | None], _Writer],
        reopen: Callable[[GroupOpened], Awaitable[Reopened[_Writer]]] | None,
        sessions: SessionMaker,
    ) -> None:
        self._sender = sender
        self._outbox = outbox
        self._make_writer = make_writer
        self._reopen = reopen
        self._group = group
        self._sessions = sessions
        self._has_sessions = False
        self._is_open = False
        self._queues: dict[int, TrajectoryQueue] = {}
        self._writers: dict[int, _Writer] = {}
        self._halves: list[_Writer] = []

    def trajectory(self, sample: int) -> _Writer:
        """Return the writer of one sample, which is open; the same writer for the same sample.

        Raises:
            InvalidTurnError: the group has no such sample.
            RejectedError: the group was not entered, or the sample is finished already.
        """
        group_id = self._group.group_id
        checked_key(TrajectoryKey(group_id, sample), num_samples=self._group.num_samples)
        writer = self._writers.get(sample)
        if writer is None:
            if not self._is_open:
                raise RejectedError(f"group {group_id!r} is not open: use it in {self._entered_by}")
            if sample not in self._queues:
                raise RejectedError(
                    f"sample {sample} of group {group_id!r} is finished, or has another generator"
                )
            queue = self._queues[sample]
            writer = self._make_writer(self._group, queue.key, queue)
            self._writers[sample] = writer
        return writer

    def __iter__(self) -> Iterator[_Writer]:
        """Yield the writers of all samples in order; with `exist_ok`, of the unfinished ones."""
        return map(self.trajectory, self._samples)

    async def _session(self, kind: type[_Session], **options: Any) -> _Session:
        if self._is_open:
            raise RejectedError(
                f"group {self._group.group_id!r} is open under this publisher: take sessions of a "
                f"group that is not in {self._entered_by}"
            )
        made = await self._sessions.make(kind, self._group, **options)
        self._has_sessions = True
        return made

    @property
    def _samples(self) -> list[int]:
        return sorted({*self._queues, *self._writers})

    async def _enter(self) -> None:
        """Open all samples, or those that a group which may exist still needs."""
        if self._has_sessions:
            raise RejectedError(
                f"group {self._group.group_id!r} has sessions of agents, which open its samples"
            )
        try:
            if self._reopen is None:
                await self._open(dict.fromkeys(range(self._group.num_samples), 0))
                return
            try:
                await self._open_rest(await self._reopen(self._group))
            except ConflictError:  # another generator was faster, or the sizes differ: raised again
                self._queues = {
                    s: queue for s, queue in self._queues.items() if queue.error is None
                }
                await self._open_rest(await self._reopen(self._group))
        except BaseException as error:
            self._abandon_unsealed(error)
            raise

    async def _open_rest(self, reopened: Reopened[_Writer]) -> None:
        """Add the unfinished samples of a group to those that are open here."""
        self._writers |= reopened.writers
        self._halves += reopened.halves
        await self._open(reopened.unopened)

    async def _open(self, attempts: Mapping[int, int]) -> None:
        """Request the admission of these attempts by sample, all at once, and wait for it."""
        group, opened = self._group, self._sender.loop_receipt()
        members = [TrajectoryKey(group.group_id, *attempt) for attempt in attempts.items()]
        self._is_open = True
        if not members:
            return
        queues = self._sender.put(
            lambda: self._outbox.admissions.request(group, members, opened=opened)
        )
        self._queues |= zip(attempts, queues, strict=True)
        await opened

    def _abandon_unsealed(self, error: BaseException | None) -> None:
        unsealed: list[int] = []
        for sample in self._samples if self._sender.process.is_here else ():
            is_started = sample in self._writers
            writer = self.trajectory(sample)
            if not writer.has_ended:
                reason = _NOT_STARTED if error is None and not is_started else reason_of(error)
                writer.abandon(reason)
                unsealed.append(sample)
        for half in self._halves if self._sender.process.is_here else ():
            half.abandon(HALF_WRITTEN)
        self._halves = []
        if unsealed and error is None:
            warn_unsealed(self._group.group_id, unsealed)


class GroupWriter(GroupWriterBase[ThreadSender, TrajectoryWriter]):
    """A group being written; a context manager. Made by `Publisher.group`."""

    _entered_by = "`with`"

    def session(
        self,
        sample: int = 0,
        *,
        attempt: int = 0,
        policy: str = "",
        max_calls: int | None = None,
        max_tokens: int | None = None,
        expires_in_s: int | None = None,
        may_seal: bool = True,
        gateway: str | None = None,
    ) -> AgentSession:
        """Return the session of one sample: an agent's model calls become its turns.

        Nothing is opened: the first model call opens the trajectory, under the writer of the
        gateway. So the group must not be entered. Limits that are None are those of the gateway.

        Args:
            sample: from 0 to `num_samples` - 1.
            attempt: number of the retry of an abandoned sample.
            policy: name of the model whose calls are stored; "" stores every call.
            max_calls: stored calls, at most.
            max_tokens: prompt and sampled tokens of all stored calls, at most.
            expires_in_s: seconds until the session ends; an hour by default, seven days at most.
            may_seal: whether the agent may seal or abandon the trajectory; the session may.
            gateway: `http://host:port` of the gateway; None for that of the publisher, else of
                TURNSTREAM_GATEWAY_URL. Its key is in the address, `http://:KEY@host`, or is that of
                the environment.

        Raises:
            InvalidTurnError: a value is wrong, or the group has `num_needed` or is an evaluation.
            InvalidConfigError: there is no address of a gateway.
            RejectedError: the group is open here.
            AccessDeniedError: the key may not write the run.
            StoreUnavailableError: the gateway or the store did not answer.
        """
        return self._sender.run(
            self._session(
                AgentSession,
                sample=sample,
                attempt=attempt,
                policy=policy,
                max_calls=max_calls,
                max_tokens=max_tokens,
                expires_in_s=expires_in_s,
                may_seal=may_seal,
                gateway=gateway,
            )
        )

    def __enter__(self) -> Self:
        self._sender.run(self._enter())
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._abandon_unsealed(error)


class AsyncGroupWriter(GroupWriterBase[Sender[Any], AsyncTrajectoryWriter]):
    """A group being written; made by `AsyncPublisher.group`. See `GroupWriter`."""

    _entered_by = "`async with`"

    async def session(
        self,
        sample: int = 0,
        *,
        attempt: int = 0,
        policy: str = "",
        max_calls: int | None = None,
        max_tokens: int | None = None,
        expires_in_s: int | None = None,
        may_seal: bool = True,
        gateway: str | None = None,
    ) -> AsyncAgentSession:
        """Return the session of one sample. See `GroupWriter.session`."""
        return await self._session(
            AsyncAgentSession,
            sample=sample,
            attempt=attempt,
            policy=policy,
            max_calls=max_calls,
            max_tokens=max_tokens,
            expires_in_s=expires_in_s,
            may_seal=may_seal,
            gateway=gateway,
        )

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._abandon_unsealed(error)
