"""The model calls of all sessions in one gateway process.

A call runs in a task of its own, so its answer outlives the connection of its agent. A retry with
the same body joins the call, or gets the answer again. If this process does not know the answer,
the retry is a new call, which supersedes the one before.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import redis.asyncio

from turnstream.errors import RejectedError
from turnstream.store.client.cancellation import cancel_all
from turnstream.types import TrajectoryKey
from turnstream_server.gateway.proxy.call_ids import new_call, request_hash
from turnstream_server.gateway.proxy.engines import Engines
from turnstream_server.gateway.proxy.live_answers import Answer
from turnstream_server.gateway.proxy.model_calls import CallRunner, ModelCall
from turnstream_server.gateway.proxy.recording import Progress, Recording
from turnstream_server.gateway.proxy.versions import NewestVersions
from turnstream_server.gateway.rest.ingest.publishers import Publishers
from turnstream_server.gateway.state import Gateway
from turnstream_server.keys.limits import Held
from turnstream_server.keys.sessions import Session
from turnstream_server.telemetry.instruments import counter

MAX_CALLS_OF_SESSION: Final = 64
"""Calls of one session in progress."""

MAX_CALLS: Final = 4_096
"""Calls of all sessions in progress in one process."""

MAX_CALLS_OF_KEY: Final = MAX_CALLS // 2
"""Those of the sessions of one API key."""

_MAX_KNOWN: Final = 16_384
"""Sessions that a process remembers, the newest."""

_MAX_KEPT: Final = 4
"""Answers of a session that are kept for retries, the newest."""

_MAX_KEPT_BYTES: Final = 1 << 20
"""Size of an answer that is kept for retries."""

MAX_KEPT_TOTAL_BYTES: Final = 64 << 20
"""Bytes of all answers that a process keeps for retries, the newest."""

_RETRY_S: Final = 1.0

_CALLS = counter(
    "turnstream_gateway_model_calls",
    "Model calls of agents, by how they ended: whole or incomplete.",
    ["outcome"],
)


class SessionLimitError(RejectedError):
    """A session has used all calls or tokens that its key allows."""


class SessionFacts(NamedTuple):
    """A session as this process knows it.

    Attributes:
        state: "new" before its first call, "open", or that of its end.
        num_turns: stored turns of the trajectory.
        num_tokens: tokens of their prompts and responses; None if it is not open.
        num_incomplete: calls in this process without a whole answer.
        last_incomplete: why the last of them has none.
    """

    state: str
    num_turns: int
    num_tokens: int | None
    num_running: int
    num_incomplete: int
    last_incomplete: str


@dataclass(slots=True, eq=False)
class _Running:
    """A call, also after its end while a retry may ask for its answer."""

    request: str
    answer: Answer = field(default_factory=Answer)
    has_failed: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def can_repeat(self) -> bool:
        """Whether its answer is kept for a retry."""
        return not self.has_failed and self.answer.num_bytes <= _MAX_KEPT_BYTES


@dataclass(slots=True, eq=False)
class _Known:
    """A session of this process."""

    recording: Recording
    calls: list[_Running] = field(default_factory=list[_Running])
    num_incomplete: int = 0
    last_incomplete: str = ""

    @property
    def num_running(self) -> int:
        """Return the number of calls in progress."""
        return sum([not call.answer.is_whole for call in self.calls])

    def repeated(self, request: str) -> _Running | None:
        """Return the call that a retry repeats: one without an agent, or else the newest."""
        same = [call for call in self.calls if call.request == request and not call.has_failed]
        lost = [c for c in same if not (c.answer.num_followers or c.answer.was_taken)]
        return (lost or same or [None])[-1]

    def drop_old(self) -> None:
        """Drop the answers of ended calls above the limits, the oldest first."""
        ended = [call for call in self.calls if call.answer.is_whole]
        kept = [call for call in ended if call.can_repeat][-_MAX_KEPT:]
        self.calls = [call for call in self.calls if not call.answer.is_whole or call in kept]


class Recorder:
    """Answers model calls, and knows the trajectories of their sessions."""

    def __init__(self, gateway: Gateway, engines: Engines, publishers: Publishers) -> None:
        self._publishers = publishers
        self._client: redis.asyncio.Redis = gateway.client
        self._runner = CallRunner(engines, NewestVersions(gateway.threads), gateway.parsers)
        self._sessions = gateway.sessions
        self._known: OrderedDict[tuple[str, TrajectoryKey], _Known] = OrderedDict()
        self._kept: deque[tuple[_Known, _Running]] = deque()
        self._num_kept_bytes = 0
        self._held = Held("model calls", num=MAX_CALLS, num_of_key=MAX_CALLS_OF_KEY)

    def recording(self, session: Session) -> Recording:
        """Return the trajectory of a session."""
        return self._of(session).recording

    async def facts(self, session: Session) -> SessionFacts:
        """Return the facts of a session; nothing is opened."""
        known = self._of(session)
        state, progress = await known.recording.look()
        return SessionFacts(
            state, *progress, known.num_running, known.num_incomplete, known.last_incomplete
        )

    async def answer(self, call: ModelCall) -> Answer:
        """Return the answer of a call, which may still grow.

        ConflictError after the end of the trajectory; RejectedError with `retry_after_s` without
        capacity for it; SessionLimitError above the limits of the session.
        """
        known, request = self._of(call.session), request_hash(call.api, call.body)
        if call.is_retry and (found := known.repeated(request)) is not None:
            return found.answer
        _check_running(known)
        self._held.check(call.session.key_id)
        if call.is_stored:
            progress = await known.recording.open()
            _check_limits(call.session, progress, num_running=known.num_running)
        running = _Running(request)
        name = new_call(request, is_retry=call.is_retry)
        known.calls.append(running)
        running.task = asyncio.create_task(
            self._run(call, name, known, running), name=f"model-call-{name}"
        )
        return running.answer

    async def close(self) -> None:
        """End all calls; their agents get no whole answer."""
        tasks = [call.task for known in self._known.values() for call in known.calls]
        await cancel_all([task for task in tasks if task is not None])

    async def _run(self, call: ModelCall, name: str, known: _Known, running: _Running) -> None:
        try:
            with self._held.one_more(call.session.key_id):
                reason = await self._runner.run(call, name, known.recording, running.answer)
        except BaseException:
            running.has_failed = True
            raise
        finally:
            running.answer.end()
        if reason:
            running.has_failed = True
            known.num_incomplete += 1
            known.last_incomplete = reason
        _CALLS.labels("incomplete" if reason else "whole").inc()
        known.drop_old()
        self._keep(known, running)

    def _keep(self, known: _Known, running: _Running) -> None:
        """Count an answer that is kept, and drop the oldest of all sessions above the limit."""
        if running not in known.calls:
            return
        self._kept.append((known, running))
        self._num_kept_bytes += running.answer.num_bytes
        while self._num_kept_bytes > MAX_KEPT_TOTAL_BYTES:
            owner, oldest = self._kept.popleft()
            self._num_kept_bytes -= oldest.answer.num_bytes
            if oldest in owner.calls:
                owner.calls.remove(oldest)

    def _of(self, session: Session) -> _Known:
        name = session.run, session.key
        known = self._known.get(name)
        if known is None:
            recording = Recording(session, self._publishers, self._client, self._sessions)
            known = self._known[name] = _Known(recording)
        self._known.move_to_end(name)
        known.recording.session = session
        if len(self._known) > _MAX_KNOWN:
            self._drop_idle()
        return known

    def _drop_idle(self) -> None:
        idle = next((name for name, known in self._known.items() if not known.num_running), None)
        if idle is not None:
            del self._known[idle]


def _check_running(known: _Known) -> None:
    if (num := known.num_running) >= MAX_CALLS_OF_SESSION:
        raise RejectedError(f"the session has {num} calls in progress, the limit", _RETRY_S)


def _check_limits(session: Session, progress: Progress, *, num_running: int) -> None:
    num_turns, num_tokens = progress
    if num_turns + num_running >= session.max_calls:
        raise SessionLimitError(
            f"the session has {num_turns} stored calls and {num_running} in progress, and its key "
            f"allows {session.max_calls}: make it with a larger max_calls"
        )
    if (num_tokens or 0) >= session.max_tokens:
        raise SessionLimitError(
            f"the calls of the session have {num_tokens} tokens, and its key allows "
            f"{session.max_tokens}: make it with a larger max_tokens"
        )
