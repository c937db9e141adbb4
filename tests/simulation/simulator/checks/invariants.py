"""The invariants of a run: after every step, after every plan, and at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from simulator.checks.final_checks import everything_ended
from simulator.checks.ledger_checks import ledger_adds_up
from simulator.checks.plans import history_repeats, plan_holds
from simulator.checks.run_writes import RunWrites, Violations
from simulator.shared_state import SharedState
from simulator.world import World
from turnstream.batching.planning.plan_batch import event_order
from turnstream.store.client import keys
from turnstream_server.batcher.planner.timekeeper import STEADY_LEASES

_EVERY_STEPS = 40


class Invariants:
    """Checks one run."""

    def __init__(self, world: World, shared: SharedState) -> None:
        self._world = world
        self._shared = shared
        self.writes = RunWrites(world, shared)
        self._leases = Leases(self.writes)
        self._lows: Counter[str] = Counter()
        self._leaders: dict[bytes, bytes] = {}
        self._term: tuple[bytes, int] = b"", 0
        self._num_withdrawn = 0
        self._num_parks = 0
        world.synced = self._save
        world.lost = shared.history.lost.__setitem__

    def check_step(self) -> None:
        """After every step of the world."""
        if self.writes.new_steps:
            self._check_plans()
        self._fail_all(self._leases.check())
        if b"parked" in self.writes.hash("leader"):
            self._term = b"", 0  # parking a run releases the lease of its leader
        if self._world.num_steps % _EVERY_STEPS == 0:
            self._check_state()

    def _check_plans(self) -> None:
        for step in self.writes.take_new_steps():
            self._fail_all(plan_holds(self.writes, *self.writes.manifests[step]))
            self._fail_all(ledger_adds_up(self.writes))

    def check_end(self) -> None:
        """Check the invariants of a finished run."""
        self._check_state()
        self._fail_all(everything_ended(self.writes))
        self._fail_all(history_repeats(self.writes))

    def _check_state(self) -> None:
        self._let_plans_fall()
        self._fail_all(ledger_adds_up(self.writes))
        for check in (
            *(self._frontier_holds, self._leaders_stay_apart, self._snapshot_holds),
            *(self._payload_holds, self._writers_stay_apart, self._revisions_hold),
            self._end_holds,
        ):
            self._fail_all(check())

    def _let_plans_fall(self) -> None:
        num_withdrawn = sum([isinstance(each, tuple) for each in self.writes.plans])
        if num_withdrawn != self._num_withdrawn:
            self._num_withdrawn = num_withdrawn
            del self._lows["planned"], self._lows[_SNAPSHOT_STEP]

    def _fail_all(self, violations: Violations) -> None:
        for text in violations:
            self._world.fail(text)

    def _save(self) -> Callable[[], None]:
        """Return a function that drops what a store lost that has all until now."""
        return partial(self._restore, self.writes.save(), Counter(self._lows), self._world.now_s)

    def _restore(self, writes: Any, lows: Counter[str], synced_s: float) -> None:
        self.writes.restore(writes)
        self._leases.forget()
        self._lows = lows
        self._num_withdrawn = -1
        self._leaders.clear()  # the store may give an epoch again
        self._term = b"", 0
        self._shared.history.went_back(synced_s)
        left = dict(self.writes.revisions())
        self._shared.history.revised = {
            number: each for number, each in self._shared.history.revised.items() if number in left
        }

    def _writers_stay_apart(self) -> Violations:
        """A writer that lost a trajectory is refused before it meets the turns of another."""
        if "cut" in self._world.counts:
            return  # if the store lost an opening, another generator may write the same trajectory
        for text in self._shared.history.mixed:
            yield f"a caller was told: {text}"

    def _frontier_holds(self) -> Violations:
        frontier, manifests = self.writes.hash("frontier"), self.writes.manifests
        number = {name: int(frontier.get(name.encode(), 0)) for name in _NUMBERS}
        number["leader_epoch"] = int(self.writes.hash("leader").get(b"epoch", 0))
        for name in _GROWING:
            yield from self._grows(name, number[name])
        order = [number[name] for name in ("folded", "released", "committed", "stepped", "planned")]
        if order != sorted(order):
            yield f"folded, released, committed, stepped, planned are {order}"
        if number["planned"] != max(manifests, default=0):
            yield f"step {number['planned']} is the newest, plans are {sorted(manifests)}"
        yield from self._checkpoints_hold(number["committed"], number["released"])
        newest = self._shared.history.newest_stepped
        if self.knows_session and number["stepped"] > newest:
            yield f"step {number['stepped']} is stepped, {newest} was said"

    @property
    def knows_session(self) -> bool:
        """Return whether the store's session is the newest that was acknowledged.

        A store that lost the start of a session continues the session before it.
        """
        return self.writes.hash("frontier").get(b"session") == self._shared.history.session.encode()

    def _checkpoints_hold(self, committed: int, released: int) -> Violations:
        """Committed and retained checkpoints are on disk, and part of the surviving history."""
        history, is_known = self._shared.history, self.knows_session
        saved = max([token.step for token in history.checkpoints], default=0)
        if is_known and committed > saved:
            yield f"step {committed} is committed, but {saved} is the newest that was saved"
        for name, entry in self.writes.hash("observers").items():
            has_seen, expires_ms, _ = entry.split(b":", 2)
            if int(has_seen) < released and int(expires_ms):
                yield f"step {released} is released, {name!r} has seen {int(has_seen)}"
        if released > history.releasable and (is_known or "cut" not in self._world.counts):
            yield f"step {released} is released, {history.releasable} may be"

    def _leaders_stay_apart(self) -> Violations:
        leader = self.writes.hash("leader")
        epoch, owner = leader.get(b"epoch", b""), leader.get(b"owner")
        if owner and (before := self._leaders.setdefault(epoch, owner)) != owner:
            yield f"{before!r} and {owner!r} lead with the epoch {epoch!r}"
        if owner == b"" and (before := self._leaders.get(epoch)):
            for process in self._world.processes:
                if process.name == before.decode() and not process.task.cancelling():
                    yield f"{process.name} led with the epoch {epoch!r}, and somebody gave it back"
        yield from self._terms_last(epoch, int(leader.get(b"expires_ms", 0)))

    def _terms_last(self, epoch: bytes, expires_ms: int) -> Violations:
        """A term begins after the lease of the leader before has ended, was released or parked."""
        before, until_ms = self._term
        is_early = before not in (b"", epoch) and until_ms > self._world.store.now_ms
        if self._world.store.num_parks != self._num_parks:
            is_early, self._num_parks = False, self._world.store.num_parks
        if is_early and not self._world.counts.keys() & {"jump", "stop"}:
            yield f"the epoch {epoch!r} leads, and the lease of {before!r} has not ended"
        self._term = epoch, expires_ms

    def _snapshot_holds(self) -> Violations:
        snapshot = self.writes.hash("snapshot")
        if snapshot:
            ms, seq = event_order(snapshot[b"position"].decode())
            yield from self._grows("the position of the snapshot", ms << 64 | seq)
            yield from self._grows(_SNAPSHOT_STEP, int(snapshot[b"step"]))

    def _revisions_hold(self) -> Violations:
        """An acknowledged config is stored, and applies from its step or a withdrawn one on."""
        first_steps = dict(self.writes.revisions())
        was_withdrawn = b"withdrawn" in self.writes.hash("frontier")
        for number, (first, config) in self._shared.history.revised.items():
            if number not in first_steps or self.writes.config(number) != config:
                if "cut" in self._world.counts:  # the store lost it before its author was told
                    continue
                yield f"the config {number} is not the one that was acknowledged"
            elif not (first_steps[number] == first or was_withdrawn):
                yield f"the config {number} is from {first_steps[number]} on, and not from {first}"

    def _end_holds(self) -> Violations:
        """A run is closed as it was said last, and only one that is closed is finished."""
        frontier = self.writes.hash("frontier")
        is_closed = self.writes.is_closed
        if frontier[b"closed"] != b"%d" % is_closed:
            yield f"the run has {frontier[b'closed']!r} as closed, its events {is_closed}"
        if b"finished" in frontier and frontier[b"closed"] == b"0":
            yield "a run that is open is finished"

    def _payload_holds(self) -> Violations:
        """The epoch of a payload never falls, so an earlier writer cannot write."""
        if "jump" in self._world.counts:
            return  # a clock that is set forward removes the tombstones that refuse late writers
        for raw in self.writes.hash("ledger"):
            name = raw.decode()
            key = keys.trajectory_keys(self._shared.run, name).meta.encode()
            meta: Any = self.writes.values.get(key, {})
            if (epoch := meta.get(b"epoch")) is not None:
                yield from self._grows(f"the epoch of the payload of {name}", int(epoch))

    def _grows(self, name: str, number: int) -> Violations:
        if number < self._lows[name]:
            yield f"{name} fell from {self._lows[name]} to {number}"
        self._lows[name] = number


_SNAPSHOT_STEP = "the step of the snapshot"
_NUMBERS = (
    *("planned", "stepped", "committed", "released", "folded", "session_epoch"),
    *("opened_groups", "ends"),
)
_GROWING = (
    *("planned", "released", "folded", "session_epoch", "leader_epoch"),
    *("opened_groups", "ends"),
)


_GIVEN_UP = b"abandoned:the lease of "


class Leases:
    """Notes when the store heard of each lease, and how often its clock has jumped since."""

    def __init__(self, writes: RunWrites) -> None:
        self._writes = writes
        self._ends: dict[bytes, float] = {}
        self._heard: dict[bytes, tuple[float, int]] = {}

    def forget(self) -> None:
        """Forget the times of renewals, because the store went back."""
        self._ends = dict(self._scores())
        self._heard.clear()

    def check(self) -> Violations:
        """A jump of the clock ends no lease that was renewed after it, or shortly before.

        A writer that renewed less than half a lease ago had no time to renew again. Of two jumps in
        one silence the second may undo the first, unnoticed.
        """
        ends = self._scores()
        if ends == self._ends:
            return
        world, shared = self._writes.world, self._writes.shared
        now_s, num_jumps = world.now_s, world.counts.get("jump", 0)
        least_s = min([config.lease_s for config in shared.ever_in_force]) * STEADY_LEASES
        for name in self._ends.keys() - ends.keys():
            heard_s, num_before = self._heard.pop(name, (float("-inf"), 0))
            is_early = now_s - heard_s < least_s and num_jumps - num_before <= 1
            if is_early and self._writes.hash("ledger").get(name, b"").startswith(_GIVEN_UP):
                yield f"{name.decode()} is given up {now_s - heard_s:.3f} s after it was heard"
        for name, end in ends.items():
            if self._ends.get(name) != end:
                self._heard[name] = now_s, num_jumps
        self._ends = dict(ends)

    def _scores(self) -> dict[bytes, float]:
        leases: Any = self._writes.value("leases")
        return {} if leases is None else leases.scores
