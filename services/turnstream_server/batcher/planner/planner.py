"""The task of one run in one replica: follow the run, lead it, and park it while it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self

import redis.asyncio

from turnstream.errors import FencedError, RunNotFoundError, TurnstreamError, UnavailableError
from turnstream.store.client.backoff import pause_after
from turnstream.store.client.cancellation import to_the_end
from turnstream.store.client.connection import connect_async
from turnstream.store.client.replies import translating
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.planner.decisions import FoldBrokenError
from turnstream_server.batcher.planner.leader import Leader
from turnstream_server.batcher.planner.listener import ParkedRuns, RunListener
from turnstream_server.batcher.planner.releaser import Releaser
from turnstream_server.batcher.planner.renewal import LeadershipKeeper
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.batcher.planner.timekeeper import Timekeeper
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.leadership.leader_fields import (
    note_trouble,
    park_leadership,
    release_leadership,
)
from turnstream_server.ledger.leadership.writes import (
    Leadership,
    Position,
    Term,
    acquire_leadership,
)
from turnstream_server.ledger.planning.announcements import read_revisions_async
from turnstream_server.loops import first_result

logger = logging.getLogger(__name__)

_SETTLED_S: Final = 2.0
"""A term that lasts for so long has recovered from the failures of earlier terms."""
_RELEASE_S: Final = 1.0
_RUN_ID = re.compile(rb"\brun_id:(\w+)")


class PinnedClient:
    """A client that refuses another server instance; a context manager.

    A restarted store may have lost a leader's lease, and may grant its epoch to another owner. So
    an epoch is valid only with the instance of the first connection. A connection to another one
    raises FencedError before anything is sent.
    """

    def __init__(self, url: str) -> None:
        self.run_id = ""
        self.client: redis.asyncio.Redis = connect_async(url)
        options = self.client.connection_pool.connection_kwargs
        self._check: Callable[[Any], Awaitable[None]] | None = options.get("redis_connect_func")
        options["redis_connect_func"] = self._meet

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await to_the_end(self.client.aclose())

    async def _meet(self, connection: Any) -> None:
        await (connection.on_connect() if self._check is None else self._check(connection))
        await connection.send_command("INFO", "server", check_health=False)
        answer: bytes = await connection.read_response()
        found = _RUN_ID.search(answer)
        run_id = found[1].decode() if found else ""
        if self.run_id and run_id != self.run_id:
            await connection.disconnect()
            raise FencedError(
                f"the store was restarted: it is {run_id[:8]}, no longer {self.run_id[:8]}"
            )
        self.run_id = run_id


class RunPlanner:
    """Refreshes a run's view, and plans the run if no other replica does."""

    def __init__(
        self,
        view: RunView,
        assembler: Assembler,
        *,
        keeper: LeadershipKeeper,
        upkeep: Upkeep,
        parked: ParkedRuns,
    ) -> None:
        self.view = view
        self._assembler = assembler
        self._keeper = keeper
        self._upkeep = upkeep
        self._parked = parked
        self._leads_parked = True
        self._server_id = ""

    async def run(self) -> None:
        """Run until cancelled, or until the run is deleted."""
        num_failures = 0
        while True:
            started_s = asyncio.get_running_loop().time()
            try:
                await self._lead_and_park()
            except RunNotFoundError:
                logger.warning("run %s is gone from the store", self.view.run)
                self.view.mark_deleted()
                return
            except FencedError as error:
                logger.warning("no longer leading run %s: %s", self.view.run, error)
            except UnavailableError as error:
                logger.warning("planning of run %s waits: %s", self.view.run, error)
            except Exception:  # a defect in one run must not stop the others
                logger.exception("planning of run %s failed", self.view.run)
            lasted_s = asyncio.get_running_loop().time() - started_s
            num_failures = num_failures + 1 if lasted_s < _SETTLED_S else 1
            await asyncio.sleep(pause_after(num_failures))

    async def _lead_and_park(self) -> None:
        """Lead while there is work, also in a parked run at first, and wait while it is parked."""
        self._leads_parked = True
        while True:
            async with PinnedClient(self._keeper.url) as store:
                position = await self._run_term(store)
            self._leads_parked = await self._parked.wait(self.view.run, position)

    async def _run_term(self, store: PinnedClient) -> Position:
        """Follow and lead until the run is parked; return the position up to which it was read."""
        await first_result(self._check_server(store))
        leadership = await first_result(self._follow(store.client))
        if leadership.parked is not None:
            return leadership.parked
        term = Term(store.client, self.view.run, leadership.epoch)
        try:
            position = await first_result(
                self._lead(term),
                self._keeper.hold(term.run, term.epoch),
                self._clear_trouble(term),
            )
        except asyncio.CancelledError:
            await self._release(term)
            raise
        except (FencedError, RunNotFoundError, UnavailableError):
            raise
        except Exception as error:
            await first_result(self._note_trouble(term, str(error) or repr(error)))
            raise
        assert position is not None, "only a run that is parked ends a term without an error"
        return position

    async def _check_server(self, store: PinnedClient) -> None:
        with translating():
            await store.client.ping()
        if self._server_id and store.run_id != self._server_id:
            logger.warning("the store was restarted: run %s is read again", self.view.run)
            self.view.reset()
        self._server_id = store.run_id

    async def _follow(self, client: redis.asyncio.Redis) -> Leadership:
        """Keep the view fresh until the leadership is ours, or the run is parked."""
        loop = asyncio.get_running_loop()
        frontier = await self.view.refresh()
        listener = RunListener(client, self.view.run, after_step=frontier.planned)
        while True:
            leadership = await acquire_leadership(
                client,
                self.view.run,
                owner=self._keeper.owner,
                lease_s=self._keeper.lease_s,
                leads_parked=self._leads_parked,
            )
            if leadership.is_ours or leadership.parked is not None:
                return leadership
            self._leads_parked = False
            self.view.num_ready = None
            retry_at_s = loop.time() + leadership.lease_left_s
            while (left_s := retry_at_s - loop.time()) > 0:
                news = await listener.wait(with_events=False, wait_s=left_s)
                if news.is_frontier_old:
                    listener.fall_back((await self.view.refresh()).planned)

    async def _lead(self, term: Term) -> Position | None:
        """Lead from the newest snapshot on until the run is parked; again if the fold breaks."""
        while True:
            revisions = await read_revisions_async(term.client, term.run)
            leader = Leader(
                term, self.view, self._assembler, revisions=revisions, upkeep=self._upkeep
            )
            releaser = Releaser(term, self.view, owner=self._keeper.owner, upkeep=self._upkeep)
            try:
                return await first_result(
                    leader.lead(),
                    releaser.run(),
                    self._keep_time(term, leader),
                    self._park_when_idle(term, leader, releaser),
                )
            except FoldBrokenError:
                logger.exception("the state of run %s is rebuilt", self.view.run)

    async def _park_when_idle(self, term: Term, leader: Leader, releaser: Releaser) -> Position:
        """Park the run once it had no news for a while, and nothing in it is left to do."""
        loop = asyncio.get_running_loop()
        position, since_s = leader.position, loop.time()
        while True:
            await asyncio.sleep(self._parked.after_s)
            if leader.position != position:
                position, since_s = leader.position, loop.time()
                continue
            is_ending = self.view.frontier.is_closed and leader.undecided()
            if leader.is_waiting and releaser.done_at_s >= since_s and not is_ending:
                failpoint("park.before")
                if await park_leadership(term, position):
                    failpoint("park.after")
                    return position

    async def _keep_time(self, term: Term, leader: Leader) -> None:
        """Run the timekeeper with the config in force, until another one is in force."""
        while True:
            revision, config = await self.view.newest_config()
            await Timekeeper(term, self.view, leader, config).run(revision=revision)

    async def _clear_trouble(self, term: Term) -> None:
        """Clear the recorded error once this term has lasted; then wait until cancelled."""
        await asyncio.sleep(_SETTLED_S)
        await self._note_trouble(term, "")
        await asyncio.Event().wait()

    async def _note_trouble(self, term: Term, trouble: str) -> None:
        """Record the error for `turnstream why`, if the store is reachable."""
        owner = self._keeper.owner
        with contextlib.suppress(TurnstreamError):
            await note_trouble(term, "planning_trouble", trouble, owner=owner)

    async def _release(self, term: Term) -> None:
        with contextlib.suppress(TurnstreamError, TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                await release_leadership(term, owner=self._keeper.owner)
