"""Invariants of every plan: I2, I4, I6, the chain, and its reproduction from the events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator
from typing import NamedTuple

from simulator.checks.run_writes import RunWrites, Violations
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.fold.withdrawing import state_before, with_planned_reward
from turnstream.batching.merge.plan import GroupPlan, Manifest, MiniBatchPlan, TrajectoryPlan
from turnstream.batching.planning.plan_batch import event_order, plan_batch
from turnstream.batching.planning.selection import Selector
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.types import ConfigRevised, SealedTrajectory, TrajectoryKey


def plan_holds(writes: RunWrites, manifest: Manifest, own_hash: str) -> Violations:
    """A plan continues the chain, and takes whole groups that are in no other."""
    before = writes.manifests.get(manifest.step - 1)
    if manifest.previous_hash != (before[1] if before else ""):
        yield f"step {manifest.step} does not continue the chain"
    first_row = before[0].end_row_id if before else 0
    if manifest.mini_batches[0].first_row_id != first_row:
        yield f"step {manifest.step} begins with row {manifest.mini_batches[0].first_row_id}"
    for group in manifest.groups:
        yield from _group_holds(writes, manifest, group)
        if group.group_id in writes.evals:
            yield f"step {manifest.step} trains the evaluation {group.group_id}"
    yield from _mini_batches_hold(manifest)
    yield from _has_its_config(writes, manifest)


def _group_holds(writes: RunWrites, manifest: Manifest, group: GroupPlan) -> Violations:
    samples = [member.key.sample for member in group.trajectories]
    if len(set(samples)) != len(samples):
        yield f"I4: group {group.group_id} has the samples {samples}"
    config = writes.config(manifest.config_revision)
    compared = [each for each in group.trajectories if not _is_left_out(each, config)]
    if config.estimator == "remax" and 0 not in [each.key.sample for each in compared]:
        yield f"I4: group {group.group_id} has no greedy sample, with which it is compared"
        return
    for member in group.trajectories:
        name = keys.trajectory_id(member.key)
        if member.status == "error" and config.error_trajectories == "drop":
            yield f"I4: {name} ended with an error, and is planned"
        if writes.step_of.setdefault(name, manifest.step) != manifest.step:
            yield f"I2: {name} is in step {writes.step_of[name]} and {manifest.step}"
        attempted = writes.shared.history.sealed_turns.get(name, set())
        unused = frozenset(member.left_out)
        if (member.payload_crcs, unused) not in attempted:
            yield f"{name} is planned without {sorted(unused)}, as nobody sealed it"
        rows = [turn for row in member.sequences for turn in row.turns]
        if len(rows) + len(unused) != len(member.payload_crcs):
            yield f"I2: {name} has a turn in two of its rows"
        expected = _advantage(member, compared, config) if member in compared else 0.0
        if not math.isclose(member.advantage, expected, abs_tol=1e-6):
            yield f"I4: {name} has the advantage {member.advantage}, not {expected}"


def _advantage(
    member: TrajectoryPlan, compared: list[TrajectoryPlan], config: BatchingConfig
) -> float:
    """Return reward less baseline, which is the greedy sample's reward or the others' mean."""
    if config.estimator == "remax":
        baseline = [each.reward for each in compared if each.key.sample == 0]
    else:
        baseline = [each.reward for each in compared if each is not member]
    return member.reward - math.fsum(baseline) / len(baseline) if baseline else 0.0


def _is_left_out(member: TrajectoryPlan, config: BatchingConfig) -> bool:
    """Whether the reward of a member is outside the baseline, by its status alone."""
    masked = {"error"} if config.error_trajectories == "mask" else set[str]()
    masked |= {"truncated", "aborted"} if config.mask_truncated else set()
    return config.masked_reward == "leave_out" and member.status in masked


def _has_its_config(writes: RunWrites, manifest: Manifest) -> Violations:
    """A plan is made by the last of the configs that are to be in force at its step."""
    due = max(number for number, first in writes.revisions() if first <= manifest.step)
    if manifest.config_revision != due:
        yield f"step {manifest.step} has the config {manifest.config_revision}, and not {due}"


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
    counted = (
        sum(number for *_, number in live),
        len(live),
        len({key for _, key, _ in live}),
        len({group for group, *_ in live}),
    )
    shipped = part.denominators[:4]
    if shipped != counted:
        yield f"I6: step {manifest.step} ships {shipped}, counted {counted}"


def history_repeats(writes: RunWrites) -> Violations:
    """A fold of all events from the first on gives every batch again, bit by bit."""
    replay = _Replay(writes)
    due = deque(_in_order(writes))
    for event_id, record in writes.events:
        replay.apply(event_id, record)
        while due and event_order(due[0][0]) <= event_order(event_id):
            _, what = due.popleft()
            if isinstance(what, Manifest):
                yield from replay.plan_again(what)
            elif what is not None:
                replay.put_back(what)
    if due:
        yield f"at events that nobody wrote were planned or withdrawn: {due}"


class _Withdrawn(NamedTuple):
    manifests: list[Manifest]
    dead: Collection[TrajectoryKey]


class _Replay:
    """A leader that starts with the first event, and knows the planned batches."""

    def __init__(self, writes: RunWrites) -> None:
        self._writes = writes
        self._config, self._number, self._since = writes.config(1), 1, "0-0"
        self._fold, self._selector = RunFold(self._config), Selector(self._config)

    def apply(self, event_id: str, record: bytes) -> None:
        event = decode_event(record)
        if isinstance(event, ConfigRevised):
            self._config = self._writes.config(event.revision)
            self._number, self._since = event.revision, event_id
            self._selector.revise(self._config)
            self._fold.revise(event_id, self._config)
        else:
            self._fold.apply(event_id, event)
            self._selector.apply(event_id, event, self._fold)

    def put_back(self, what: _Withdrawn) -> None:
        """Put the groups of withdrawn plans back, and restart after the last valid plan."""
        events = [decode_event(record) for _, record in self._writes.events]
        sealed = {each.key: each for each in events if isinstance(each, SealedTrajectory)}
        members = {
            plan.key: with_planned_reward(
                sealed[plan.key], plan, config=self._writes.config(manifest.config_revision)
            )
            for manifest in what.manifests
            for group in manifest.groups
            for plan in group.trajectories
            if plan.key not in what.dead
        }
        self._fold.state = state_before(what.manifests, members, self._fold.state)
        versions, self._selector = self._selector.versions, Selector(self._config)
        self._selector.versions = versions
        self._selector.pass_step(what.manifests[0].step - 1)

    def plan_again(self, manifest: Manifest) -> Violations:
        """The plan that was written follows from the events so far."""
        config, fold, choice = self._config, self._fold, self._selector.choice
        ready = fold.ready[: len(manifest.groups)]
        if self._writes.shared.rotten:
            # A group before them may have died in a later event.
            names = {each.group_id for each in manifest.groups}
            ready = tuple(each for each in fold.ready if each.group_id in names)
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
            config_revision=self._number,
            revised_at=self._since,
            revision=manifest.revision,
            chosen_at="" if choice is None else choice.chosen_at,
            masked_versions=() if choice is None else choice.masked_versions,
        )
        if again != manifest:
            yield f"step {manifest.step} is not planned again from the same events"
        fold.take(ready)
        self._selector.pass_step(manifest.step)


def _in_order(writes: RunWrites) -> Iterator[tuple[str, Manifest | _Withdrawn | None]]:
    """Plans and withdrawals, each with the event at which it follows from what was heard."""
    standing: list[Manifest] = []
    for each in writes.plans:
        if isinstance(each, Manifest):
            standing.append(each)
            yield each.last_event_id, each
        else:
            position, event_id, event = each
            gone = [manifest for manifest in standing if manifest.step >= event.step]
            standing = standing[: -len(gone)]
            yield position, _Withdrawn(gone, event.dead)
            yield event_id, None
