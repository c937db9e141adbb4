"""The decisions of a leader's fold, written to the ledger: ends with their reasons, and refills."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from turnstream.batching.fold.decisions import (
    Decision,
    GroupCut,
    GroupDropped,
    GroupEvaluated,
    MemberDropped,
    RefillWanted,
)
from turnstream.errors import ConflictError
from turnstream.store.client import keys
from turnstream_server.batcher.planner.dead_letters import DeadLetterWriter
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.planning.groups import Settlement, grant_refill, settle_groups
from turnstream_server.bus.release.release import groups_that_are_gone
from turnstream_server.failpoints import reach

logger = logging.getLogger(__name__)


class Settler:
    """Tells the ledger, for one term of a run's leader.

    Args:
        term: the leader's term.
        dead_letters: written before every decision, because it depends on them.
    """

    def __init__(self, term: Term, dead_letters: DeadLetterWriter) -> None:
        self._term = term
        self._dead_letters = dead_letters

    async def carry_out(self, standing: Iterable[Decision]) -> None:
        """Tell what still holds; all of it may have been told before, by another leader."""
        settled: list[Settlement] = []
        refills: list[RefillWanted] = []
        for decision in standing:
            if isinstance(decision, RefillWanted):
                refills.append(decision)
            else:
                settled.append(decision)
                _log(decision)
        await self._settle(settled)
        for wanted in refills:
            await self._grant(wanted)

    async def still_known(self, decisions: list[Decision]) -> list[Decision]:
        """Those that the ledger may not have been told of: a group that is gone was settled.

        A member may still be there: it was sealed when its group was decided, or later.
        """
        names = list({keys.encode_name(_group_of(each)): None for each in decisions})
        gone = await groups_that_are_gone(self._term.client, self._term.run, names)
        return [
            each
            for each in decisions
            if isinstance(each, MemberDropped) or keys.encode_name(_group_of(each)) not in gone
        ]

    async def _settle(self, settled: list[Settlement]) -> None:
        await self._dead_letters.write()
        if settled:
            reach("settle.before")
        try:
            await settle_groups(self._term, settled)
        except ConflictError as error:  # the rest of them was settled
            logger.warning("a group of run %s cannot be settled: %s", self._term.run, error)
        if settled:
            reach("settle.after")

    async def _grant(self, wanted: RefillWanted) -> None:
        reach("grant_refill.before")
        is_new = await grant_refill(self._term, wanted)
        reach("grant_refill.after")
        if is_new:
            logger.info("refill %d of group %s: %s", wanted.number, wanted.key.group_id, wanted.key)


def _group_of(decision: Decision) -> str:
    match decision:
        case MemberDropped(key=key) | RefillWanted(key=key):
            return key.group_id
        case (
            GroupDropped(group_id=group_id)
            | GroupCut(group_id=group_id)
            | GroupEvaluated(group_id=group_id)
        ):
            return group_id


def _log(settled: Settlement) -> None:
    match settled:
        case MemberDropped(key=key, state=state, reason=reason):
            logger.debug("trajectory %s is %s: %s", key, state, reason)
        case GroupCut(group_id=group_id, reason=reason):
            logger.debug("group %s is cut: %s", group_id, reason)
        case GroupDropped(group_id=group_id, state=state, reason=reason):
            logger.info("group %s is %s: %s", group_id, state, reason)
        case GroupEvaluated(group_id=group_id, keys=counted):
            logger.info("group %s is evaluated, %d trajectories of it", group_id, len(counted))
