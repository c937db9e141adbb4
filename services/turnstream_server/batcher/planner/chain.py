"""The chain of a run's plans, and the config of the next one, for one leader."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.rules import changed_settings
from turnstream.batching.fold.decisions import ReadyGroup
from turnstream.batching.merge.plan import Manifest
from turnstream.batching.planning.plan_batch import plan_batch
from turnstream.batching.planning.report import plan_warnings
from turnstream.batching.planning.selection import Choice
from turnstream.errors import BatchingError, CorruptRecordError, FencedError
from turnstream.records.snapshots import PlannerSnapshot
from turnstream.store.run.configs import Revisions
from turnstream.types import ConfigRevised
from turnstream_server.batcher.assembly.payload import Damage, UnplannableError
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.leadership.writes import Term
from turnstream_server.ledger.planning.announcements import announce_revision, read_revisions_async
from turnstream_server.ledger.planning.manifests import (
    StoredManifest,
    encode_for_store,
    read_manifests,
    write_manifest,
)

logger = logging.getLogger(__name__)

PAGE_MANIFESTS: Final = 64
"""Plans of one reply when a history is replayed: a manifest may have a megabyte."""


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
        failpoint("revise.before")
        await announce_revision(self._term, ConfigRevised(revision=revision, step=step))
        failpoint("revise.after")
        self._known = await read_revisions_async(self._term.client, self._term.run)
        return self._known.revision(revision).announced_at


class PlanChain:
    """The plans of one run up to the newest that its leader knows, and its hash."""

    def __init__(self, term: Term, view: RunView, in_force: ConfigInForce) -> None:
        self.next_step = 1
        self.hash = ""
        self.next_row_id = 0
        self._term = term
        self._view = view
        self._in_force = in_force
        self._warned: set[str] = set()

    @property
    def newest_step(self) -> int:
        """The step of the newest plan; 0 before the first."""
        return self.next_step - 1

    def restore(self, snapshot: PlannerSnapshot) -> None:
        """Continue after the newest plan of a snapshot."""
        self.next_step = snapshot.step + 1
        self.hash = snapshot.manifest_hash
        self.next_row_id = snapshot.next_row_id

    def note(self, stored: StoredManifest) -> None:
        """Continue after a written plan."""
        self.next_step = stored.manifest.step + 1
        self.hash = stored.hash
        self.next_row_id = stored.manifest.end_row_id

    async def read_on(self) -> deque[StoredManifest]:
        """Return the next existing plans, and continue after them; none at the end."""
        stored = await read_manifests(
            self._term.client, self._term.run, first_step=self.next_step, max_count=PAGE_MANIFESTS
        )
        for each in stored:
            self.note(each)
        return deque(stored)

    def draft(self, groups: tuple[ReadyGroup, ...], choice: Choice | None) -> StoredManifest:
        """Return the plan of the next step with these groups, as it would be stored.

        Raises:
            UnplannableError: it fails, and so do single trajectories of it by themselves.
            BatchingError: it fails with each of its trajectories, or with none by itself.
        """
        try:
            return self._draft(groups, choice)
        except (MemoryError, OSError):
            raise
        except Exception as error:
            reason = f"step {self.next_step} cannot be planned: {error!r}"
            alone = [replace(g, members=(m,)) for g in groups for m in g.members]
            damages = [Damage(g.members[0].key, reason) for g in alone if self._fails(g, choice)]
            if 0 < len(damages) < len(alone):
                raise UnplannableError(tuple(damages)) from error
            names = ", ".join(group.group_id for group in groups)
            raise BatchingError(f"{reason}; its groups: {names}") from error

    def _draft(self, groups: tuple[ReadyGroup, ...], choice: Choice | None) -> StoredManifest:
        manifest = plan_batch(
            groups,
            config=self._in_force.config,
            run=self._view.run,
            step=self.next_step,
            lineage=self._view.frontier.lineage,
            previous_hash=self.hash,
            first_row_id=self.next_row_id,
            config_revision=self._in_force.revision,
            revised_at=self._in_force.since,
            revision=self._view.frontier.revision_of(self.next_step),
            chosen_at="" if choice is None else choice.chosen_at,
            masked_versions=() if choice is None else choice.masked_versions,
        )
        return encode_for_store(manifest)

    def _fails(self, group: ReadyGroup, choice: Choice | None) -> bool:
        try:
            self._draft((group,), choice)
        except (MemoryError, OSError):
            raise
        except Exception:  # noqa: BLE001 - any error says that it fails
            return True
        return False

    async def write(self, stored: StoredManifest) -> bool:
        """Write a plan; return False, with a new view, if the step must be planned again."""
        is_written = await write_manifest(self._term, stored)
        if not is_written:
            await self._view.refresh()
        return is_written

    def warn_of(self, manifest: Manifest, *, announced: Collection[int]) -> None:
        """Log the warnings about a batch, each kind once."""
        config = self._in_force.config
        for kind, sentence in plan_warnings(manifest, config, announced=announced).items():
            if kind not in self._warned:
                self._warned.add(kind)
                logger.warning(
                    "step %d of run %s: %s; the next batches are not reported",
                    manifest.step,
                    self._view.run,
                    sentence,
                )
