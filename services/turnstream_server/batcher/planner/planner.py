"""The task of one run in one replica: follow the run, lead it, and park it while it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

import redis.asyncio

from turnstream.errors import FencedError, RunNotFoundError, TurnstreamError, UnavailableError
from turnstream.store.client.backoff import pause_after
from turnstream.store.client.replies import translating
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.planner.dead_letters import FoldBrokenError
from turnstream_server.batcher.planner.event_loop import first_of
from turnstream_server.batcher.planner.leader import Hook, Leader, no_hook
from turnstream_server.batcher.planner.listener import RunListener
from turnstream_server.batcher.planner.orphaned_groups import orphaned_groups
from turnstream_server.batcher.planner.parking import ParkedRuns
from turnstream_server.batcher.planner.releaser import Releaser
from turnstream_server.batcher.planner.renewal import RENEWALS_PER_LEASE, LeadershipKeeper
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.planner.timekeeper import timekeeper
from turnstream_server.batcher.planner.upkeep import Upkeep
from turnstream_server.bus.core.server_instance import PinnedClient
from turnstream_server.bus.leadership.leadership import (
    Leadership,
    Position,
    Term,
    acquire_leadership,
    note_trouble,
    park_leadership,
    release_leadership,
)
from turnstream_server.bus.planning.revisions import read_revisions_async
from turnstream_server.bus.planning.trajectories import post_forgotten_seals
from turnstream_server.failpoints import reach

logger = logging.getLogger(__name__)

_SETTLED_S: Final = 2.0
"""A term that lasts for so long has recovered from the failures of earlier terms."""
_RELEASE_S: Final = 1.0


class RunPlanner:
    """Refreshes a run's view, and plans the run if no other replica does.

    Args:
        client: client of the store, until the first term.
        view: this replica's view of the run.
        assembler: checks the payload of new plans.
        keeper: renews the leadership, and reports the leader.
        upkeep: settings of the release while the run is led here.
        parked: wakes the planners of parked runs.
        before_write: awaited between the check of a plan and its writing; for fault injection.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        view: RunView,
        assembler: Assembler,
        *,
        keeper: LeadershipKeeper,
        upkeep: Upkeep,
        parked: ParkedRuns,
        before_write: Hook = no_hook,
    ) -> None:
        self._client = client
        self._view = view
        self._assembler = assembler
        self._keeper = keeper
        self._upkeep = upkeep
        self._parked = parked
        self._before_write = before_write
        self._leads_parked = True
        self._run_id = ""

    async def run(self) -> None:
        """Run until cancelled, or until the run is deleted."""
        num_failures = 0
        while True:
            started_s = asyncio.get_running_loop().time()
            try:
                await self._lead_and_park()
            except RunNotFoundError:
                logger.warning("run %s is gone from the store", self._view.run)
                self._view.lose()
                return
            except FencedError as error:
                logger.warning("no longer leading run %s: %s", self._view.run, error)
            except UnavailableError as error:
                logger.warning("planning of run %s waits: %s", self._view.run, error)
                self._view.trouble = str(error)
            except Exception as error:  # a defect in one run must not stop the others
                logger.exception("planning of run %s failed", self._view.run)
                self._view.trouble = str(error) or repr(error)
            lasted_s = asyncio.get_running_loop().time() - started_s
            num_failures = num_failures + 1 if lasted_s < _SETTLED_S else 1
            await asyncio.sleep(pause_after(num_failures))

    async def _lead_and_park(self) -> None:
        """Lead while there is work, and wait while the run is parked; never returns.

        The first term leads a parked run, too: this replica may have other settings than the one
        that parked it.
        """
        self._leads_parked = True
        while True:
            position = await self._follow_then_lead()
            self._leads_parked = await self._parked.wait(self._view.run, position)
            self._view.explain = None

    async def _follow_then_lead(self) -> Position:
        """One term, with one start of the store: another may have lost what this one knows.

        Returns:
            The position up to which the run was read when it was parked.
        """
        async with PinnedClient(self._keeper.url) as store:
            return await self._follow_then_lead_in(store)

    async def _follow_then_lead_in(self, store: PinnedClient) -> Position:
        self._client = store.client
        await first_of(self._meet(store))
        leadership = await first_of(self._follow())
        if leadership.parked is not None:
            return leadership.parked
        term = Term(self._client, self._view.run, leadership.epoch)
        try:
            position = await first_of(
                self._lead(term),
                self._keeper.hold(term.run, term.epoch),
                self._keep_time(term),
                self._sweep(),
                self._recover(),
            )
        except asyncio.CancelledError:
            await self._release(term)
            raise
        except (FencedError, RunNotFoundError, UnavailableError):
            raise
        except Exception as error:
            await first_of(self._note_trouble(str(error) or repr(error)))
            raise
        assert position is not None, "only a run that is parked ends a term without an error"
        return position

    async def _meet(self, store: PinnedClient) -> None:
        """Drop the view of the run if the store was restarted."""
        with translating():
            await store.client.ping()
        if self._run_id and store.run_id != self._run_id:
            logger.warning("the store was restarted: run %s is read again", self._view.run)
            self._view.forget()
        self._run_id = store.run_id

    async def _follow(self) -> Leadership:
        """Keep the view fresh until the leadership is ours, or the run is parked."""
        loop = asyncio.get_running_loop()
        frontier = await self._view.refresh()
        listener = RunListener(self._client, self._view.run, after_step=frontier.planned)
        while True:
            leadership = await acquire_leadership(
                self._client,
                self._view.run,
                owner=self._keeper.owner,
                lease_s=self._keeper.lease_s,
                leads_parked=self._leads_parked,
            )
            if leadership.is_ours or leadership.parked is not None:
                return leadership
            self._leads_parked = False
            try_again_s = loop.time() + leadership.lease_left_s
            while (left_s := try_again_s - loop.time()) > 0:
                news = await listener.wait(with_events=False, wait_s=left_s)
                if news.is_frontier_old:
                    listener.fall_back((await self._view.refresh()).planned)

    async def _lead(self, term: Term) -> Position | None:
        """Plan and release until the run is idle, and park it."""
        while True:
            try:
                return await self._lead_once(term)
            except FoldBrokenError:
                logger.exception("the state of run %s is rebuilt", self._view.run)

    async def _lead_once(self, term: Term) -> Position | None:
        """Lead from the newest snapshot on, until the run is parked or an event breaks the fold."""
        leader = Leader(
            term,
            self._view,
            self._assembler,
            revisions=await read_revisions_async(term.client, term.run),
            upkeep=self._upkeep,
            before_write=self._before_write,
        )
        releaser = Releaser(term, self._view, owner=self._keeper.owner, upkeep=self._upkeep)
        position = await first_of(
            leader.lead(), releaser.run(), self._park_when_idle(term, leader, releaser)
        )
        self._view.explain = leader.explain  # it holds while nothing is written to the run
        return position

    async def _park_when_idle(self, term: Term, leader: Leader, releaser: Releaser) -> Position:
        """Park the run once it had no news for a while, and nothing in it is left to do."""
        loop = asyncio.get_running_loop()
        position, since_s = leader.position, loop.time()
        while True:
            await asyncio.sleep(self._parked.after_s)
            if leader.position != position:
                position, since_s = leader.position, loop.time()
                continue
            if leader.is_waiting and releaser.done_at_s >= since_s and self._may_park():
                reach("park.before")
                if await park_leadership(term, position):
                    reach("park.after")
                    return position

    def _may_park(self) -> bool:
        """Whether no group of a closed run is open, which would end by time, and planning works."""
        is_ending = self._view.frontier.is_closed and self._view.undecided()
        return not is_ending and not self._view.trouble

    async def _keep_time(self, term: Term) -> None:
        """Let time pass, by the config in force."""
        while True:
            revision, config = await self._view.newest_config()
            keeper = timekeeper(
                term,
                config=config,
                others=[orphaned_groups(term, self._view, config)],
                sleep=self._view.wait_for_change,
            )
            await keeper.keep(until=lambda old=revision: self._view.led_by_revision > old)

    async def _sweep(self) -> None:
        """Post the stored seals of dead writers, once; then wait until cancelled.

        It waits a while after the start of the term: by then, live writers have posted their own.
        """
        await asyncio.sleep(self._keeper.lease_s / RENEWALS_PER_LEASE)
        num_posted = await post_forgotten_seals(self._client, self._view.run)
        if num_posted:
            logger.info("posted %d forgotten seals of run %s", num_posted, self._view.run)
        await asyncio.Event().wait()

    async def _recover(self) -> None:
        """Clear the recorded error once this term has lasted; then wait until cancelled."""
        await asyncio.sleep(_SETTLED_S)
        self._view.trouble = ""
        await self._note_trouble("")
        await asyncio.Event().wait()

    async def _note_trouble(self, trouble: str) -> None:
        """Record the error for `turnstream why`, if the store is reachable."""
        with contextlib.suppress(TurnstreamError):
            await note_trouble(
                self._client,
                self._view.run,
                "planning_trouble",
                trouble,
                owner=self._keeper.owner,
            )

    async def _release(self, term: Term) -> None:
        """Release the leadership for another replica, if the store is reachable."""
        with contextlib.suppress(TurnstreamError, TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                await release_leadership(term, owner=self._keeper.owner)
