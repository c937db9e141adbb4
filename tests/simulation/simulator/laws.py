"""What must hold of a life: after every step, whenever a batch is planned, and at its end."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from simulator.life import Life
from simulator.values import EntryId
from simulator.world import World
from turnstream.batching.plan import GroupPlan, Manifest, MiniBatchPlan
from turnstream.batching.planning import event_order, plan_batch
from turnstream.batching.readiness import RunFold
from turnstream.batching.selection import Selector
from turnstream.records.compact import decode_ends
from turnstream.records.events import decode_event
from turnstream.records.manifests import decode_manifest, manifest_hash
from turnstream.store import keys
from turnstream.types import GroupOpened, Purpose

_UNFINISHED = ("open", "sealed", "awaiting_reward")
_GIVEN_UP = re.compile(r"abandoned:the lease of (.*) ended")
_NO_LEAVE = "the run takes no new group"
_HOLDING = (b"open:", b"sealed:", b"awaiting_reward:")
_TAKING = (b":open", b":evaluating")
_DROPPED = ("filtered", "expired", "incomplete")

Violations = Iterator[str]


class Laws:
    """Watches one life.

    Attributes:
        events: every event that was ever written, trimmed ones too.
        manifests: every plan that was ever written, by step.
    """

    def __init__(self, world: World, life: Life) -> None:
        self._world = world
        self._life = life
        self._values = world.store.values
        names = keys.run_keys(life.run)
        self._names = {name: key.encode() for name, key in names._asdict().items()}
        self.events: list[tuple[str, bytes]] = []
        self.manifests: dict[int, tuple[Manifest, str]] = {}
        self._step_of: dict[str, int] = {}
        self._new_steps: list[int] = []
        self._lows: Counter[str] = Counter()
        self._evals: set[str] = set()
        self._opened: set[str] = set()
        self._synced: tuple[Any, ...] = ()
        world.store.appended = self._note_entry
        world.synced = self._note_synced
        world.went_back = self._go_back
        world.lost = life.history.lost.__setitem__

    def check_step(self) -> None:
        """After every step of the world."""
        while self._new_steps:
            step = self._new_steps.pop(0)
            self._blame_all(self._plan_holds(*self.manifests[step]))
            self._blame_all(self._ledger_adds_up())
        if self._world.num_steps % 25 == 0:
            self._blame_all(self._ledger_adds_up())
            self._blame_all(self._frontier_holds())
            self._blame_all(self._writers_stay_apart())

    def check_end(self) -> None:
        """When the run is over."""
        self._blame_all(self._ledger_adds_up())
        self._blame_all(self._frontier_holds())
        self._blame_all(self._writers_stay_apart())
        self._blame_all(self._everything_ended())
        self._blame_all(self._history_repeats())

    def _writers_stay_apart(self) -> Violations:
        """Whoever lost a trajectory is told so, before it meets what others wrote.

        Where the store lost an opening, another may have written the same trajectory since.
        """
        if "cut" in self._world.counts:
            return
        for text in self._life.history.mixed:
            yield f"a caller was told: {text}"

    def _note_synced(self) -> None:
        self._synced = (
            *(len(self.events), dict(self.manifests), dict(self._step_of)),
            *(Counter(self._lows), set(self._evals), set(self._opened)),
        )

    def _go_back(self, synced_s: float) -> None:
        """The store lost what came after; so do we."""
        num_events, self.manifests, self._step_of, self._lows, self._evals, self._opened = (
            self._synced
        )
        del self.events[num_events:]
        planned = {step: own_hash for step, (_, own_hash) in self.manifests.items()}
        self._life.history.planned = planned
        self._life.history.went_back(synced_s)

    def _note_entry(self, key: bytes, entry_id: EntryId, fields: Sequence[bytes]) -> None:
        if key == self._names["events"]:
            self.events.append((bytes(entry_id).decode(), fields[1]))
            event = decode_event(fields[1])
            if isinstance(event, GroupOpened):
                self._opened.add(event.group_id)
                if event.purpose is Purpose.EVAL:
                    self._evals.add(event.group_id)
        elif key == self._names["plan"]:
            manifest = decode_manifest(fields[1])
            if manifest.step in self.manifests:
                self._world.blame(f"step {manifest.step} is planned twice")
            self.manifests[manifest.step] = manifest, manifest_hash(fields[1])
            self._life.history.planned[manifest.step] = manifest_hash(fields[1])
            self._new_steps.append(manifest.step)

    def _blame_all(self, violations: Violations) -> None:
        for text in violations:
            self._world.blame(text)

    def _hash(self, name: str) -> dict[bytes, bytes]:
        value: Any = self._values.get(self._names[name])
        return value or {}

    # I1

    def _ledger_adds_up(self) -> Violations:
        """The counts are those of the ledger and of what left it, and add up to the accepted."""
        counts = {name.decode(): int(number) for name, number in self._hash("counts").items()}
        accepted = counts.pop("accepted")
        counts.pop("late_rewards", None)
        if sum(counts.values()) != accepted or min(counts.values(), default=0) < 0:
            yield f"I1: {accepted} are accepted, but the counts are {counts}"
        found = Counter(
            entry.partition(b":")[0].decode() for entry in self._hash("ledger").values()
        )
        for reason, number in self._hash("reasons").items():
            found[reason.partition(b":")[0].decode()] += int(number)
        planned = found.pop("planned", 0)
        counted = {name: number for name, number in counts.items() if number and name != "planned"}
        if counted != dict(found):
            yield f"I1: the counts are {counted}, the ledger has {dict(found)}"
        total = sum(each.num_trajectories for each, _ in self.manifests.values())
        if not planned <= counts.get("planned", 0) == total:
            yield f"I1: {counts.get('planned', 0)} are counted as planned, {total} are in plans"
        yield from self._leases_hold()
        yield from self._groups_are_counted()
        yield from self._bytes_add_up()

    def _leases_hold(self) -> Violations:
        leases: Any = self._values.get(self._names["leases"])
        held = set(leases.scores) if leases is not None else set[bytes]()
        ledger = self._hash("ledger").items()
        if held != (opened := {name for name, entry in ledger if entry.startswith(b"open:")}):
            yield f"what is open has a lease, and nothing else has: {held ^ opened}"

    def _bytes_add_up(self) -> Violations:
        """What is held is held for what may still write, or has payload; the sums are of that."""
        ledger, groups, held = (self._hash(name) for name in ("ledger", "groups", "held"))
        sums = Counter[str]()
        for name, size in held.items():
            entry = ledger.get(name)
            if entry is None and not groups.get(name.partition(b"/")[0], b"").endswith(_TAKING):
                yield f"bytes are held for {name!r}, which is over"
            part = "planned" if entry is not None and entry.startswith(b"planned:") else "stored"
            sums["reserved" if size.startswith(b"r") else part] += int(size.removeprefix(b"r"))
        budget = {name.decode(): int(number) for name, number in self._hash("budget").items()}
        found = {part: budget.get(part, 0) for part in ("reserved", "stored", "planned")}
        if found != {part: sums[part] for part in found}:
            yield f"the bytes held are {dict(sums)}, the sums say {found}"
        for name, entry in ledger.items():
            if entry.startswith(_HOLDING) and name not in held:
                yield f"{name!r} is {entry!r} and holds no bytes"

    def _groups_are_counted(self) -> Violations:
        frontier, groups = self._hash("frontier"), self._hash("groups")
        over = int(self._hash("over").get(b"n", 0))
        opened = int(frontier[b"opened_groups"]) + len(self._evals)
        if opened != len(groups) + over:
            yield f"{opened} groups were opened: {len(groups)} and {over}"
        num_open = sum([entry.endswith(b":open") for entry in groups.values()])
        if num_open != int(frontier.get(b"open_groups", 0)):
            yield f"{frontier.get(b'open_groups')!r} groups are counted as open, {num_open} are"
        if num_open > (self._life.config.max_open_groups or math.inf):
            yield f"{num_open} groups are open, {self._life.config.max_open_groups} may be"
        yield from self._prompts_are_counted(groups)
        live = int(frontier[b"live_groups"])
        # A rollback lowers the limit, and ends no group that was let in before it.
        most_stepped = max(int(frontier[b"stepped"]), *self._life.history.ever_trained, 0)
        limit = self._limit(most_stepped)
        if not 0 <= live <= limit:
            yield f"{live} groups are live, {limit} are allowed"

    def _prompts_are_counted(self, groups: dict[bytes, bytes]) -> Violations:
        """Each prompt is left, given out as a group that may be trained, or done."""
        prompts = self._hash("prompts")
        again: Any = self._values.get(self._names["again"])
        waiting: set[bytes] = set() if again is None else set(again.scores)
        tasks = {n: number for n, number in self._hash("tasks").items() if n[:1] != b"?"}
        added, last, done = (int(prompts.get(n, 0)) for n in (b"added", b"next", b"done"))
        if len(tasks) != last - len(waiting) - done or len({*tasks.values()}) != len(tasks):
            yield f"{last} prompts were given out, {done} done, {waiting} wait, but tasks: {tasks}"
        if len([n for n in prompts if n.isdigit()]) != added - done:
            yield f"{added} prompts were added, {done} are done, {[*prompts]} are there"
        for name, number in tasks.items():
            if number in waiting or not groups.get(name, b"").endswith((b":open", b":decided")):
                yield f"prompt {number!r} is given out as {name!r}: {groups.get(name)!r}"

    @property
    def are_evals_open(self) -> bool:
        """Whether an evaluation goes on: no run waits for it."""
        return any(entry.endswith(b":evaluating") for entry in self._hash("groups").values())

    def _limit(self, stepped: int) -> int:
        config = self._life.config
        return (config.max_staleness + stepped + 1) * config.batch_groups

    # the frontier

    def _frontier_holds(self) -> Violations:
        """What may only grow has grown, and what follows something comes behind it."""
        frontier = self._hash("frontier")
        number = {name: int(frontier.get(name.encode(), 0)) for name in _NUMBERS}
        number["leader_epoch"] = int(self._hash("leader").get(b"epoch", 0))
        for name in _GROWING:
            if number[name] < self._lows[name]:
                yield f"{name} fell from {self._lows[name]} to {number[name]}"
            self._lows[name] = number[name]
        order = [number[name] for name in ("folded", "released", "committed", "stepped", "planned")]
        if order != sorted(order):
            yield f"folded, released, committed, stepped, planned are {order}"
        if number["planned"] != max(self.manifests, default=0):
            yield f"step {number['planned']} is the newest, plans are {sorted(self.manifests)}"
        if number["released"] > self._life.history.releasable:
            yield f"step {number['released']} is released, {self._life.history.releasable} may be"

    # I2, I4, I6, the chain

    def _plan_holds(self, manifest: Manifest, own_hash: str) -> Violations:
        """A plan continues the chain, and takes whole groups that are in no other."""
        before = self.manifests.get(manifest.step - 1)
        if manifest.previous_hash != (before[1] if before else ""):
            yield f"step {manifest.step} does not continue the chain"
        first_row = before[0].end_row_id if before else 0
        if manifest.mini_batches[0].first_row_id != first_row:
            yield f"step {manifest.step} begins with row {manifest.mini_batches[0].first_row_id}"
        for group in manifest.groups:
            yield from self._group_holds(manifest, group)
            if group.group_id in self._evals:
                yield f"step {manifest.step} trains the evaluation {group.group_id}"
        yield from _mini_batches_hold(manifest)
        yield from self._was_intended(manifest)

    def _group_holds(self, manifest: Manifest, group: GroupPlan) -> Violations:
        samples = [member.key.sample for member in group.trajectories]
        if len(set(samples)) != len(samples):
            yield f"I4: group {group.group_id} has the samples {samples}"
        rewards = [member.reward for member in group.trajectories]
        for member in group.trajectories:
            name = keys.trajectory_id(member.key)
            if self._step_of.setdefault(name, manifest.step) != manifest.step:
                yield f"I2: {name} is in step {self._step_of[name]} and {manifest.step}"
            said = self._life.history.said.get(name, set())
            if member.payload_crcs not in said:
                yield f"{name} is planned with turns that nobody sealed"
            others = _mean_of_others(rewards, member.reward)
            expected = 0.0 if others is None else member.reward - others
            if not math.isclose(member.advantage, expected, abs_tol=1e-6):
                yield f"I4: {name} has the advantage {member.advantage}, not {expected}"

    def _was_intended(self, manifest: Manifest) -> Violations:
        """Whoever was about to write the plan of this step before had the same."""
        config = self._life.config
        if config.surplus != "drop" or config.chooses_by_event:
            return  # what comes in between may change it: see `_history_repeats`
        for intended in self._life.history.intended.pop(manifest.step, ()):
            if _names(intended) != _names(manifest):
                yield f"step {manifest.step} is not what a leader before was about to plan"

    # the end

    def _everything_ended(self) -> Violations:
        """P4: everything is in a final state; what was acknowledged as sealed did not vanish."""
        frontier = self._hash("frontier")
        if frontier[b"stepped"] != frontier.get(b"planned", b"0"):
            yield f"the run ended with {frontier}"
        states = self._states()
        accepted = int(self._hash("counts")[b"accepted"])
        if len(states) != accepted:
            yield f"P4: {accepted} are accepted, {len(states)} have a state"
        for name, state in states.items():
            if state.partition(":")[0] in _UNFINISHED:
                yield f"P5: {name} is {state} at the end"
            given_up = _GIVEN_UP.fullmatch(state)
            if given_up and self._world.must_keep_leases(given_up[1]):
                yield f"{name} is {state}, who lives"
        yield from self._nothing_vanished(states)
        for group, entry in self._hash("groups").items():
            if entry.endswith((b":open", b":decided", b":evaluating")):
                yield f"P5: group {group!r} is {entry!r} at the end"
        yield from self._trained_once()
        yield from self._nothing_came_back(states)

    def _nothing_vanished(self, states: dict[str, str]) -> Violations:
        """What was acknowledged as sealed has a state at the end of the run.

        Where the power was cut, this is promised for publishers that live.
        """
        history, world = self._life.history, self._world
        for name in sorted({*history.acknowledged, *[n for n in history.lost if "/" in n]}):
            if "cut" in world.counts and history.writers.get(name, set()) & world.died:
                continue
            state = states.get(name, "nowhere")
            group_id = keys.parse_trajectory_id(name).group_id
            ends = {"evaluated"} if group_id in self._evals else {"planned", *_DROPPED}
            if name in history.lost and self._is_named_well(name, state):
                continue
            if state == "nowhere" and "cut" in world.counts and self._is_decided(group_id):
                continue  # it was lost, and when it was sent again its group had gone on without it
            if name in history.acknowledged and state.partition(":")[0] not in {*ends, "surplus"}:
                yield f"P1: {name} was acknowledged as sealed, and is {state}"
            is_given_again = group_id.startswith("p") and len(history.writers[name]) > 1
            if name in history.lost and not is_given_again:
                yield f"P1: {history.lost[name]}: all of its writers live, and it is {state}"

    def _is_named_well(self, name: str, state: str) -> bool:
        """Whether a living publisher may be told that the store lost this, and that it stays so.

        When the store came back, another generator was faster to hold it, or it was given up while
        its own slept, or its group got no leave to begin again.
        """
        if "cut" not in self._world.counts:
            return False
        has_another = state != "nowhere" and len(self._life.history.writers[name]) > 1
        has_no_leave = state == "nowhere" and self._life.history.lost[name].endswith(_NO_LEAVE)
        return bool(_GIVEN_UP.fullmatch(state)) or has_another or has_no_leave

    def _is_decided(self, group_id: str) -> bool:
        """Whether a group has ended, or is gone from the store, which had let it begin."""
        entry = self._hash("groups").get(keys.encode_name(group_id).encode(), b":over")
        return group_id in self._opened and not entry.endswith((b":open", b":evaluating"))

    def _nothing_came_back(self, states: dict[str, str]) -> Violations:
        """What left the ledger has no payload any more, whoever still wrote to it.

        A clock that is set forward ends the tombstones that refuse who was late.
        """
        if "jump" in self._world.counts:
            return
        ledger = self._hash("ledger")
        for name, state in states.items():
            turns = keys.trajectory_keys(self._life.run, name).turns.encode()
            if name.encode() not in ledger and turns in self._values:
                yield f"{name} is {state}, was released, and has turns again"

    def _states(self) -> dict[str, str]:
        """Every trajectory with its state, from the ledger, the plans and the compact records."""
        states = {name: f"planned:{step}" for name, step in self._step_of.items()}
        for record in self._hash("ended").values():
            ended = decode_ends(record)
            for key, end in zip(ended.trajectories, ended.ends, strict=True):
                if (name := keys.trajectory_id(key)) in states:
                    self._world.blame(f"{name} is {states[name]} and {end}")
                states[name] = end
        for raw, entry in self._hash("ledger").items():
            name, state = raw.decode(), entry.decode()
            if states.setdefault(name, state) != state:
                self._world.blame(f"{name} is {states[name]} and {state}")
        return states

    def _trained_once(self) -> Violations:
        """I2 and I3: what survives is every step once, each as it was planned."""
        expected = {step: own_hash for step, (_, own_hash) in self.manifests.items()}
        trained = self._life.history.trained
        if trained != expected:
            yield f"I3: the surviving steps are {sorted(trained)}, planned are {sorted(expected)}"

    def _history_repeats(self) -> Violations:
        """Whoever folds all events from the first on plans every batch again, to the bit."""
        config = self._life.config
        fold, selector = RunFold(config), Selector(config)
        steps = sorted(self.manifests)
        for event_id, record in self.events:
            event = decode_event(record)
            fold.apply(event_id, event)
            selector.apply(event_id, event, fold)
            while steps and event_order(self.manifests[steps[0]][0].last_event_id) <= event_order(
                event_id
            ):
                manifest, _ = self.manifests[steps.pop(0)]
                yield from self._is_planned_again(manifest, fold, selector)
        if steps:
            yield f"steps {steps} were planned at events that nobody wrote"

    def _is_planned_again(
        self, manifest: Manifest, fold: RunFold, selector: Selector
    ) -> Violations:
        config = self._life.config
        ready = fold.ready[: len(manifest.groups)]
        choice = selector.choice
        if config.chooses_by_event:
            ready = () if choice is None else choice.groups
        if [each.group_id for each in ready] != [each.group_id for each in manifest.groups]:
            yield f"step {manifest.step} is not planned again from the same events: other groups"
            return
        again = plan_batch(
            ready,
            config=config,
            run=manifest.run,
            step=manifest.step,
            lineage=manifest.lineage,
            previous_hash=manifest.previous_hash,
            first_row_id=manifest.mini_batches[0].first_row_id,
            config_revision=manifest.config_revision,
            chosen_at="" if choice is None else choice.chosen_at,
            masked_versions=() if choice is None else choice.masked_versions,
        )
        if again != manifest:
            yield f"step {manifest.step} is not planned again from the same events"
        fold.take(ready)
        selector.pass_step(manifest.step)


_NUMBERS = (
    *("planned", "stepped", "committed", "released", "folded", "session_epoch"),
    *("opened_groups", "ends", "closed"),
)
_GROWING = (
    *("planned", "released", "folded", "session_epoch", "leader_epoch"),
    *("opened_groups", "ends", "closed"),
)


def _names(manifest: Manifest) -> list[list[str]]:
    return [[keys.trajectory_id(each.key) for each in g.trajectories] for g in manifest.groups]


def _mean_of_others(rewards: Sequence[float], own: float) -> float | None:
    if len(rewards) < 2:
        return None
    return (math.fsum(rewards) - own) / (len(rewards) - 1)


def _mini_batches_hold(manifest: Manifest) -> Violations:
    """I4 and I6: groups follow one another whole; denominators are what the plans add up to."""
    next_group = 0
    for part in manifest.mini_batches:
        if part.first_group != next_group or part.num_groups < 1:
            yield f"I4: a mini-batch of step {manifest.step} begins with group {part.first_group}"
        next_group += part.num_groups
        yield from _denominators_hold(manifest, part)
    if next_group != len(manifest.groups):
        yield f"I4: step {manifest.step} has {len(manifest.groups)} groups, not {next_group}"


def _denominators_hold(manifest: Manifest, part: MiniBatchPlan) -> Violations:
    groups = manifest.groups[part.first_group : part.first_group + part.num_groups]
    live = [
        (group.group_id, member.key, row.num_trained_tokens)
        for group in groups
        for member in group.trajectories
        for row in member.sequences
        if row.num_trained_tokens
    ]
    shipped = part.denominators
    counted = (
        sum(number for *_, number in live),
        len(live),
        len({key for _, key, _ in live}),
        len({group for group, *_ in live}),
    )
    said = (
        shipped.num_tokens,
        shipped.num_sequences,
        shipped.num_trajectories,
        shipped.num_groups,
    )
    if said != counted:
        yield f"I6: step {manifest.step} ships {said}, counted {counted}"


def final_states(laws: Laws) -> Counter[str]:
    """How many trajectories ended in which state."""
    return Counter(state.partition(":")[0] for state in laws._states().values())
