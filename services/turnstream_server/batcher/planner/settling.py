"""The decisions of a leader's fold, written to the ledger: ends with their reasons, and refills."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from turnstream.batching.fold.decisions import Decision, MemberDropped, RefillWanted
from turnstream.errors import ConflictError
from turnstream.store.client import keys
from turnstream_server.batcher.planner.dead_letters import DeadLetterWriter
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.planning.groups import Settlement, grant_refill, settle_groups
from turnstream_server.bus.release.release import compact_groups
from turnstream_server.failpoints import reach

logger = logging.getLogger(__name__)


class Settler:
    """Writes decisions to the ledger, for one term of a run's leader.

    Args:
        dead_letters: written before every decision, because it depends on them.
    """

    def __init__(self, term: Term, dead_letters: DeadLetterWriter) -> None:
        self._term = term
        self._dead_letters = dead_letters

    async def carry_out(self, decisions: Iterable[Decision]) -> None:
        """Write decisions; those that another leader has written already change nothing."""
        settled: list[Settlement] = []
        refills: list[RefillWanted] = []
        for decision in decisions:
            if isinstance(decision, RefillWanted):
                refills.append(decision)
            else:
                settled.append(decision)
                logger.debug("run %s: %s", self._term.run, decision)
        await self._settle(settled)
        for wanted in refills:
            await self._grant(wanted)

    async def without_settled(self, decisions: list[Decision]) -> list[Decision]:
        """Return the decisions whose group is still in the ledger, or whose member may be.

        A member of a released group may be left: it was sealed when its group was decided, or
        later.
        """
        groups = [keys.encode_name(_group_of(each)) for each in decisions]
        names = list(dict.fromkeys(groups))
        gone = await compact_groups(self._term.client, self._term.run, names)
        return [
            each
            for each, group in zip(decisions, groups, strict=True)
            if isinstance(each, MemberDropped) or group not in gone
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
    if isinstance(decision, MemberDropped | RefillWanted):
        return decision.key.group_id
    return decision.group_id
