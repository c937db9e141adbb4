"""What the store of a life was seen to write, also what it has trimmed or released since."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from simulator.life import Life
from simulator.values import EntryId
from simulator.world import World
from turnstream.batching.plan import Manifest
from turnstream.records.events import decode_event
from turnstream.records.manifests import decode_manifest, manifest_hash
from turnstream.store import keys
from turnstream.types import (
    GroupOpened,
    PlansWithdrawn,
    Purpose,
    SealedTrajectory,
    VersionAnnounced,
)

Violations = Iterator[str]


class Seen:
    """What was written of one life, and how the store looks now.

    Attributes:
        values: of the store, by key.
        events: every event that was ever written, by its id.
        manifests: every plan that was ever written, by step, with its hash; but those withdrawn.
        plans: every plan that was ever written, in order; and in the place of a withdrawal the
            position that its snapshot has, and the event.
        step_of: in which step a trajectory is planned.
        evals: groups that evaluate.
        opened: groups that were opened.
        new_steps: that were planned since they were taken.
    """

    def __init__(self, world: World, life: Life) -> None:
        self.world = world
        self.life = life
        self.values = world.store.values
        names = keys.run_keys(life.run)._asdict()
        self._names = {name: key.encode() for name, key in names.items()}
        self.events: list[tuple[str, bytes]] = []
        self.manifests: dict[int, tuple[Manifest, str]] = {}
        self.plans: list[Manifest | tuple[str, str, PlansWithdrawn]] = []
        self.step_of: dict[str, int] = {}
        self.evals: set[str] = set()
        self.opened: set[str] = set()
        self.new_steps: list[int] = []
        self._synced: tuple[Any, ...] = ()
        world.store.appended = self._note_entry

    def hash(self, name: str) -> dict[bytes, bytes]:
        """A hash of the run, by the name of its key."""
        return self.value(name) or {}

    def value(self, name: str) -> Any:
        """The value of a key of the run; None where there is none."""
        return self.values.get(self._names[name])

    def take_new_steps(self) -> list[int]:
        """Those that were planned since this was called."""
        new, self.new_steps = self.new_steps, []
        return new

    def note_synced(self) -> None:
        """The disk has all of it."""
        self._synced = (
            *(len(self.events), dict(self.manifests), dict(self.step_of)),
            *(set(self.evals), set(self.opened), [*self.plans]),
        )

    def go_back(self) -> None:
        """The store lost what came after; so do we."""
        num_events, manifests, step_of, evals, opened, plans = self._synced
        self.manifests, self.step_of, self.evals, self.opened = manifests, step_of, evals, opened
        self.plans = plans
        self.new_steps = [step for step in self.new_steps if step in self.manifests]
        del self.events[num_events:]
        planned = {step: own_hash for step, (_, own_hash) in self.manifests.items()}
        self.life.history.planned = planned

    def _note_planner(self, written: object) -> None:
        """What a planner writes, it writes while it leads; a forgotten seal anybody may post."""
        owner, served = self.hash("leader").get(b"owner", b"").decode(), self.world.served
        is_free = isinstance(written, SealedTrajectory) or not owner
        if served.startswith("batcher") and served != owner and not is_free:
            self.world.blame(f"{served} writes {written} while {owner} leads")

    def _note_going_on(self, written: object) -> None:
        """A run that is paused takes no new group, and plans no batch."""
        if b"paused" in self.hash("frontier"):
            self.world.blame(f"{written}, and the run is paused")

    def _note_version(self, announced: VersionAnnounced) -> None:
        """Weights are of the session that is present, and of the history that goes on."""
        frontier, served = self.hash("frontier"), self.world.served
        lineage, session = frontier[b"lineage"].decode(), frontier[b"session"].decode()
        if announced.lineage != lineage:
            self.world.blame(f"{announced} while the run continues {lineage!r}")
        if session.rpartition("-")[0] != served:
            self.world.blame(f"{served} announces {announced} while {session!r} trains")

    def _note_withdrawal(self, event_id: str, event: PlansWithdrawn) -> None:
        """Its plans are void; nothing of them was stepped."""
        if event.step <= int(self.hash("frontier")[b"stepped"]):
            self.world.blame(f"{event} of a step that is stepped")
        if not any(keys.trajectory_id(key) in self.life.rotten for key in event.dead):
            self.world.blame(f"{event}, and nothing of it was damaged")
        self.plans.append((self.hash("snapshot")[b"position"].decode(), event_id, event))
        self.manifests = {s: each for s, each in self.manifests.items() if s < event.step}
        self.step_of = {name: s for name, s in self.step_of.items() if s < event.step}
        self.new_steps = [step for step in self.new_steps if step < event.step]
        self.life.history.withdrew(event.step)

    def _note_entry(self, key: bytes, entry_id: EntryId, fields: Sequence[bytes]) -> None:
        if key == self._names["events"]:
            self.events.append((bytes(entry_id).decode(), fields[1]))
            event = decode_event(fields[1])
            self._note_planner(event)
            if isinstance(event, GroupOpened):
                self.opened.add(event.group_id)
                if event.purpose is Purpose.EVAL:
                    self.evals.add(event.group_id)
                else:
                    self._note_going_on(event)
            elif isinstance(event, VersionAnnounced):
                self._note_version(event)
            elif isinstance(event, PlansWithdrawn):
                self._note_withdrawal(self.events[-1][0], event)
        elif key == self._names["plan"]:
            manifest = decode_manifest(fields[1])
            self._note_planner(f"step {manifest.step}")
            self._note_going_on(f"step {manifest.step} is planned")
            if manifest.step in self.manifests:
                if self.manifests[manifest.step][1] != manifest_hash(fields[1]):
                    self.world.blame(f"step {manifest.step} is planned twice")
                return  # a withdrawal writes those that stand again
            self.plans.append(manifest)
            self.manifests[manifest.step] = manifest, manifest_hash(fields[1])
            self.life.history.planned[manifest.step] = manifest_hash(fields[1])
            self.new_steps.append(manifest.step)
