"""The writes of a run that the store received, including those it trimmed or released."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from simulator.shared_state import SharedState
from simulator.store.values import EntryId
from simulator.world import World
from turnstream.batching.config import BatchingConfig
from turnstream.batching.merge.plan import Manifest
from turnstream.records.configs import decode_config
from turnstream.records.events import decode_event
from turnstream.records.manifests import decode_manifest, manifest_hash
from turnstream.store.client import keys
from turnstream.types import (
    ConfigRevised,
    GroupOpened,
    PlansWithdrawn,
    Purpose,
    RunClosed,
    RunReopened,
    SealedTrajectory,
    VersionAnnounced,
)

Violations = Iterator[str]


class RunWrites:
    """The writes of one run, and the current content of the store.

    Attributes:
        manifests: every valid plan, by step, with its hash.
        plans: every plan in order; a withdrawal is the position of its snapshot, its id and its
            event.
    """

    def __init__(self, world: World, shared: SharedState) -> None:
        self.world = world
        self.shared = shared
        self.values = world.store.values
        names = keys.run_keys(shared.run)._asdict()
        self._names = {name: key.encode() for name, key in names.items()}
        self.events: list[tuple[str, bytes]] = []
        self.manifests: dict[int, tuple[Manifest, str]] = {}
        self.plans: list[Manifest | tuple[str, str, PlansWithdrawn]] = []
        self.step_of: dict[str, int] = {}
        self.evals: set[str] = set()
        self.opened: set[str] = set()
        self.is_closed = False
        self.new_steps: list[int] = []
        self._configs: dict[bytes, BatchingConfig] = {}
        self._most_live = 0
        world.store.appended = self._note_entry
        world.store.added_directly = self._check_direct_turn

    def _check_direct_turn(self, turns: bytes) -> None:
        """A turn without a script is that of the writer, follows all others, and no seal."""
        name = turns.decode()
        if not name.endswith(":turns"):
            return
        meta: Any = self.values.get(name.replace(":turns", ":meta").encode(), {})
        stream: Any = self.values[turns]
        caller = self.world.served
        if meta.get(b"writer") != caller.encode() or meta.get(b"sealed") != b"0":
            self.world.fail(f"{caller} added a turn to {name}, which has {meta}")
        if stream.last_id.seq != len(stream):
            self.world.fail(f"{name} has {len(stream)} entries, and the newest is {stream.last_id}")

    def hash(self, name: str) -> dict[bytes, bytes]:
        """A hash of the run, by the name of its key."""
        return self.value(name) or {}

    def value(self, name: str) -> Any:
        """The value of a key of the run; None where there is none."""
        return self.values.get(self._names[name])

    def config(self, number: int) -> BatchingConfig:
        """A config of the run, by its number."""
        text = self.hash("config")[b"%d" % number]
        if text not in self._configs:
            self._configs[text] = decode_config(text)
        return self._configs[text]

    def revisions(self) -> Iterator[tuple[int, int]]:
        """The number of every config that the store has, and its first step."""
        stored = self.hash("config")
        for number in range(1, int(stored.get(b"last", 1)) + 1):
            yield number, int(stored.get(b"from:%d" % number, 1))

    def num_groups(self, step: int) -> int:
        """Return the number of groups of a step."""
        return len(self.manifests[step][0].groups)

    def note_most_live(self) -> int:
        """Return the largest number of groups that may be live, by any config so far.

        It counts the groups of all plans, and of the batches that may be planned or wait for the
        trainer.
        """
        config, history = self.shared.in_force, self.shared.history
        stepped = int(self.hash("frontier")[b"stepped"])
        most_stepped = max(stepped, *history.ever_trained, history.most_withdrawn)
        ahead = config.max_staleness + 1 + most_stepped - len(self.manifests)
        usual = sum(map(self.num_groups, self.manifests))
        self._most_live = max(self._most_live, usual + ahead * config.batch_groups)
        return self._most_live

    def take_new_steps(self) -> list[int]:
        """Those that were planned since this was called."""
        new, self.new_steps = self.new_steps, []
        return new

    def save(self) -> Any:
        """Return the writes so far, for `restore`."""
        names = ("events", "manifests", "step_of", "evals", "opened", "plans", "is_closed")
        return {name: copy.copy(getattr(self, name)) for name in names}

    def restore(self, saved: Any) -> None:
        """Drop the writes that the store lost."""
        vars(self).update(saved)
        self.new_steps = [step for step in self.new_steps if step in self.manifests]
        planned = {step: own_hash for step, (_, own_hash) in self.manifests.items()}
        self.shared.history.planned = planned
        self.shared.goes_by(self.config(int(self.hash("config")[b"newest"])))
        self.shared.is_ended = self.shared.is_ended and b"finished" in self.hash("frontier")

    def _note_planner(self, written: object) -> None:
        """Only the leader writes plans and decisions; any process may post a forgotten seal."""
        owner, served = self.hash("leader").get(b"owner", b"").decode(), self.world.served
        is_free = isinstance(written, SealedTrajectory) or not owner
        if served.startswith("batcher") and served != owner and not is_free:
            self.world.fail(f"{served} writes {written} while {owner} leads")

    def _note_going_on(self, written: object) -> None:
        if b"paused" in self.hash("frontier"):
            self.world.fail(f"{written}, and the run is paused")

    def _note_version(self, announced: VersionAnnounced) -> None:
        frontier, served = self.hash("frontier"), self.world.served
        lineage, session = frontier[b"lineage"].decode(), frontier[b"session"].decode()
        if announced.lineage != lineage:
            self.world.fail(f"{announced} while the run continues {lineage!r}")
        if session.rpartition("-")[0] != served:
            self.world.fail(f"{served} announces {announced} while {session!r} trains")

    def _note_withdrawal(self, event_id: str, event: PlansWithdrawn) -> None:
        """Its plans are void; nothing of them was stepped."""
        if event.step <= int(self.hash("frontier")[b"stepped"]):
            self.world.fail(f"{event} of a step that is stepped")
        if not any(keys.trajectory_id(key) in self.shared.rotten for key in event.dead):
            self.world.fail(f"{event}, and nothing of it was damaged")
        self.plans.append((self.hash("snapshot")[b"position"].decode(), event_id, event))
        self.manifests = {s: each for s, each in self.manifests.items() if s < event.step}
        self.step_of = {name: s for name, s in self.step_of.items() if s < event.step}
        self.new_steps = [step for step in self.new_steps if step < event.step]
        self.shared.history.withdrew(event.step)

    def _note_revision(self, event: ConfigRevised) -> None:
        """A config comes into force when the step before its first is planned."""
        stored, planned = self.hash("config"), max(self.manifests, default=0)
        first = int(stored.get(b"from:%d" % event.revision, 0))
        if not first == event.step == planned + 1:
            self.world.fail(f"{event} of a config from step {first} on, and {planned} is planned")
        if event.revision <= int(stored[b"newest"]):
            self.world.fail(f"{event}, and {int(stored[b'newest'])} is in force")
        self.note_most_live()
        self.shared.goes_by(self.config(event.revision))
        self.note_most_live()

    def _note_entry(self, key: bytes, entry_id: EntryId, fields: Sequence[bytes]) -> None:
        if key == self._names["events"]:
            self._note_event(bytes(entry_id).decode(), fields[1])
        elif key == self._names["plan"]:
            self._note_plan(decode_manifest(fields[1]), manifest_hash(fields[1]))

    def _note_event(self, event_id: str, record: bytes) -> None:
        self.events.append((event_id, record))
        event = decode_event(record)
        self._note_planner(event)
        match event:
            case GroupOpened():
                self._note_opening(event)
            case VersionAnnounced():
                self._note_version(event)
            case PlansWithdrawn():
                self._note_withdrawal(event_id, event)
            case ConfigRevised():
                self._note_revision(event)
            case RunClosed() | RunReopened():
                self._note_end(event)
            case _:
                pass

    def _note_end(self, event: RunClosed | RunReopened) -> None:
        is_closed = isinstance(event, RunClosed)
        if is_closed == self.is_closed:
            self.world.fail(f"{event} is written twice")
        self.is_closed = is_closed
        self.shared.is_ended = self.shared.is_ended and is_closed

    def _note_opening(self, event: GroupOpened) -> None:
        self.opened.add(event.group_id)
        if event.purpose is Purpose.EVAL:
            self.evals.add(event.group_id)
        else:
            self._note_going_on(event)

    def _note_plan(self, manifest: Manifest, own_hash: str) -> None:
        self._note_planner(f"step {manifest.step}")
        if manifest.step in self.manifests:
            if self.manifests[manifest.step][1] != own_hash:
                self.world.fail(f"step {manifest.step} is planned twice")
            return  # a withdrawal writes those that stand again
        self._note_going_on(f"step {manifest.step} is planned")
        self.plans.append(manifest)
        self.manifests[manifest.step] = manifest, own_hash
        self.shared.history.planned[manifest.step] = own_hash
        self.new_steps.append(manifest.step)
