"""The chain of a run's plans, as one leader reads and continues it."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import Final

from turnstream.batching.fold.decisions import ReadyGroup
from turnstream.batching.merge.plan import Manifest
from turnstream.batching.planning.plan_batch import plan_batch
from turnstream.batching.planning.report import plan_warnings
from turnstream.batching.planning.selection import Choice
from turnstream.errors import BatchingError
from turnstream.records.snapshots import PlannerSnapshot
from turnstream_server.batcher.assembly.payload import Damage, UnplannableError
from turnstream_server.batcher.planner.revising import ConfigInForce
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.planning.manifests import (
    StoredManifest,
    encode_for_store,
    read_manifests,
    write_manifest,
)

logger = logging.getLogger(__name__)

PAGE_MANIFESTS: Final = 64
"""Plans of one reply when a history is replayed: a manifest may have a megabyte."""


class PlanChain:
    """The plans of one run up to the newest that its leader knows.

    Attributes:
        next_step: the step that is planned next.
        hash: hash of the newest plan; empty before the first.
        next_row_id: id of the first row of the next plan.
    """

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

    def warn_of(self, manifest: Manifest) -> None:
        """Log the warnings about a batch, each kind once."""
        for kind, sentence in plan_warnings(manifest, self._in_force.config).items():
            if kind not in self._warned:
                self._warned.add(kind)
                logger.warning(
                    "step %d of run %s: %s; the next batches are not reported",
                    manifest.step,
                    self._view.run,
                    sentence,
                )
