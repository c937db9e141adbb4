"""What an operator does to a run while it goes on, each with what must hold."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from harness.running import InVainError, Stack
from harness.sleepers import asleep
from turnstream.batching.config import BatchingConfig
from turnstream.errors import ConflictError
from turnstream.store.life import pause_run, resume_run
from turnstream.store.revisions import read_revisions, revise_config
from turnstream_server.bus.budget import read_budget
from turnstream_server.bus.frontier import read_frontier
from turnstream_server.bus.manifests import read_plan
from turnstream_server.bus.reasons import ReasonKind, reasons
from turnstream_server.bus.waits import read_snapshot

IN_FORCE_S = 60.0
FULL_S = 20.0
LEAST_BYTES = 100_000
"""Some two steps of the run."""
MOST_GROUPS = 6
"""Of a batch, before and behind a revision."""
AHEAD = 2
"""Steps between the newest plan and the first with another config: it is stored by then."""


def revise_the_run(stack: Stack) -> None:
    """Batches of another size, passes of another cost: from one step on, and not before."""
    revise(stack)


def revise(stack: Stack, meanwhile: Callable[[], None] = lambda: None, **settings: Any) -> None:
    """Let a run go on with other settings, some at random if none are given.

    Plans before the first step of the revision have a config of before, and those behind it have
    this one, whatever happens `meanwhile`, before it is in force.
    """
    client, run = stack.rig.client, stack.rig.run
    number, from_step = _store_revision(stack, settings)
    meanwhile()

    def is_planned() -> bool:
        stack.mend()
        return read_frontier(client, run).planned >= from_step

    stack.rig.wait(is_planned, f"step {from_step} by revision {number}", timeout_s=IN_FORCE_S)
    revisions = read_revisions(client, run)
    assert revisions.in_force == number
    batch_groups = revisions.config(number).batch_groups
    for step in (from_step - 1, from_step):
        stored = read_plan(client, run, step)
        if stored is None:
            continue  # released meanwhile
        planned_by = stored.manifest.config_revision
        assert (planned_by == number) == (step == from_step), (step, planned_by, number)
        if step == from_step:
            assert len(stored.manifest.groups) == batch_groups


def _store_revision(stack: Stack, settings: dict[str, Any]) -> tuple[int, int]:
    client, run = stack.rig.client, stack.rig.run
    last = read_revisions(client, run).last.config
    settings = settings or {
        "batch_groups": _other_size(last),
        "max_tokens_per_micro_batch": stack.rng.choice((64, 96, 128)),
    }
    wanted = dataclasses.replace(last, **settings)
    if wanted == last:  # that would be no revision
        wanted = dataclasses.replace(wanted, batch_groups=_other_size(last))
    while True:
        from_step = read_frontier(client, run).planned + 1 + AHEAD
        try:
            return revise_config(client, run, wanted, from_step=from_step), from_step
        except ConflictError:  # the step was planned meanwhile
            continue


def _other_size(last: BatchingConfig) -> int:
    return MOST_GROUPS if last.batch_groups < MOST_GROUPS else 4


def pause_the_run(stack: Stack) -> None:
    """No group begins and no batch is planned until it is resumed; now and then a batcher dies."""
    client, run = stack.rig.client, stack.rig.run
    pause_run(client, run, "a fault")
    before = read_frontier(client, run)
    stack.pause(stack.rng.uniform(0.2, 1.0))
    if stack.rng.random() < 0.5:
        stack.batchers[stack.rng.choice(list(stack.batchers))].kill()
        stack.mend_services()
    after = read_frontier(client, run)
    assert (before.paused, after.paused) == ("a fault", "a fault")
    assert (before.planned, before.num_opened_groups) == (after.planned, after.num_opened_groups)
    resume_run(client, run)


def shrink_the_budget(stack: Stack) -> None:
    """Producers of a trainer that stands still wait for bytes; it wakes, and all goes on.

    Raises:
        InVainError: nobody had to wait.
    """
    client, run = stack.rig.client, stack.rig.run
    before = read_revisions(client, run).last.config.max_bytes
    max_bytes = max(read_budget(client, run).held.planned, LEAST_BYTES)
    revise(stack, max_bytes=max_bytes)
    held = read_budget(client, run).held
    looks = [held.total]

    def is_full() -> bool:
        looks.append(read_budget(client, run).held.total)
        found = reasons(read_snapshot(client, run))
        return any(reason.kind is ReasonKind.OUT_OF_BYTES for reason in found)

    has_waited = False
    with asleep(stack.rig.ranks[0].pid), contextlib.suppress(TimeoutError):
        stack.rig.wait(is_full, "producers that wait for bytes", timeout_s=FULL_S)
        has_waited = True
    revise(stack, max_bytes=before)
    # What a trainer waits for begins above it: a batch, before the trainer slept.
    allowed = max(max_bytes, looks[0]) + 2 * MOST_GROUPS * held.estimate
    assert max(looks) <= allowed, (max(looks), max_bytes, held)
    if not has_waited:
        raise InVainError("nobody waited for bytes")
