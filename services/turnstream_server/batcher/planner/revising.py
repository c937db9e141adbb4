"""The config that the events of a run have put in force, for one leader."""

from __future__ import annotations

import logging

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.rules import changed_settings
from turnstream.errors import CorruptRecordError, FencedError
from turnstream.store.run.configs import Revisions
from turnstream.types import ConfigRevised
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.planning.announcements import announce_revision, read_revisions_async
from turnstream_server.failpoints import reach

logger = logging.getLogger(__name__)


class ConfigInForce:
    """The config of one leader's term, from the first revision on, or that of a snapshot.

    Attributes:
        revision: number of the config in force.
        since: id of the event that put it in force; "0-0" before the first.
    """

    def __init__(self, term: Term, known: Revisions) -> None:
        self.revision = known.stored[0].number
        self.since = "0-0"
        self.config: BatchingConfig = known.stored[0].config
        self._term = term
        self._known = known

    def restore(self, revision: int, since: str) -> None:
        """Continue with the config of a snapshot, or of an event.

        Raises:
            FencedError: this term does not know it: a successor has stored it and the snapshot.
        """
        if revision > self._known.last.number:
            raise FencedError(f"another planner of run {self._term.run} has revision {revision}")
        self.revision, self.since = revision, since
        self.config = self._known.revision(revision).config

    def revision_of_event(self, event_id: str) -> ConfigRevised | None:
        """Return the revision of an unreadable event; None if it revised no config.

        The store has the event's id with the config, so a damaged record cannot undo the revision.
        """
        revision = self._known.put_in_force_by(event_id)
        if revision is None:
            return None
        return ConfigRevised(revision=revision.number, step=revision.from_step)

    async def learn(self, event_id: str, event: ConfigRevised) -> None:
        """Read the revisions again if a successor of this term has put this one in force."""
        if not self._known.was_put_in_force(event.revision, event_id):
            self._known = await read_revisions_async(self._term.client, self._term.run)

    def take(self, event_id: str, event: ConfigRevised) -> bool:
        """Put a revision in force; return False where it was in force before.

        Raises:
            CorruptRecordError: the store does not say that this event put it in force.
        """
        if event.revision <= self.revision:
            return False
        if not self._known.was_put_in_force(event.revision, event_id):
            raise CorruptRecordError(
                f"config revision {event.revision} was not put in force by this event"
            )
        before = self.config
        self.restore(event.revision, event_id)
        changes = changed_settings(before, self.config)
        logger.info(
            "run %s has config revision %d from step %d on: %s",
            self._term.run,
            event.revision,
            event.step,
            ", ".join(f"{each.name}={each.after!r}" for each in changes),
        )
        return True

    async def announce(self, *, step: int) -> str:
        """Put the revision of `step` in force; return the id of the event that does so."""
        self._known = await read_revisions_async(self._term.client, self._term.run)
        due = self._known.due(step=step)
        revision = self._known.in_force if due is None else due.number
        reach("revise.before")
        await announce_revision(self._term, ConfigRevised(revision=revision, step=step))
        reach("revise.after")
        self._known = await read_revisions_async(self._term.client, self._term.run)
        return self._known.revision(revision).announced_at
