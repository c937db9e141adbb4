"""Every failpoint of the product, and the occasions at which a process comes to it.

Each function lets one process die at a failpoint of its own, and then looks at what its successor
makes of it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Final

from harness.actions import revise
from harness.beside import Side, side_run
from harness.running import Stack
from turnstream.store import keys
from turnstream.store.run_ids import find_run
from turnstream.store.runs import list_runs
from turnstream_server.bus.dead_letters import read_dead_letters
from turnstream_server.bus.deletion import delete_run
from turnstream_server.bus.forks import token_of_step
from turnstream_server.bus.frontier import read_frontier
from turnstream_server.bus.replans import await_replan, request_replan
from turnstream_server.bus.states import read_states
from turnstream_server.jobs.stack import Service

_COMMAND_S: Final = 60.0
_DAMAGED: Final = "g/0/0"


def kill_a_batcher_that_plans(stack: Stack) -> None:
    """While it chooses groups, and around the manifest."""
    failpoint = _draw(stack, kill_a_batcher_that_plans)
    by_event = failpoint.startswith("batch_due.")
    if by_event:
        revise(stack, selection="in_order")
    stack.doom(failpoint)
    if by_event:
        revise(stack, selection="ready_first")


def kill_a_batcher_that_serves(stack: Stack) -> None:
    """In the calls of the ranks."""
    failpoint = _draw(stack, kill_a_batcher_that_serves)
    begins = failpoint.startswith("session.")
    stack.doom(failpoint, stack.start_ranks if begins else lambda: None)


def kill_a_batcher_that_revises(stack: Stack) -> None:
    """Around the event that puts another config in force."""
    failpoint = _draw(stack, kill_a_batcher_that_revises)
    revise(stack, lambda: stack.doom(failpoint))


def kill_a_batcher_that_decides(stack: Stack) -> None:
    """Of a group a member is gone: it is given up, tried again, and dropped at its deadline."""
    failpoint = _draw(stack, kill_a_batcher_that_decides)
    policy = {"lease_s": 0.3, "group_deadline_s": 1.0, "deadline_policy": "refill"}
    with side_run(stack, **policy, max_refills=1) as side:

        def leave() -> None:
            side.seal("g", 0, num_samples=2)
            side.leave_open("g", 1, num_samples=2)

        stack.doom(failpoint, leave)
        side.wait_for({"accepted": 2, "abandoned": 1, "incomplete": 1})
        assert side.frontier.planned == 0


def kill_a_batcher_that_ends_a_run(stack: Stack) -> None:
    """Its last batch is a short one."""
    failpoint = _draw(stack, kill_a_batcher_that_ends_a_run)
    with side_run(stack, batch_groups=2) as side:

        def end() -> None:
            side.seal("g", 0, 1, num_samples=2)
            side.close()

        stack.doom(failpoint, end)
        stack.rig.wait(lambda: side.frontier.is_finished, f"the end of {side.run}")
        side.wait_for({"accepted": 2, "planned": 2})
        assert side.frontier.planned == 1


def kill_a_batcher_that_finds_damage(stack: Stack) -> None:
    """Before a batch is planned, or behind it."""
    failpoint = _draw(stack, kill_a_batcher_that_finds_damage)
    with side_run(stack) as side:
        if failpoint.startswith("mark_dead."):
            stack.doom(failpoint, lambda: _seal_with_damage(side))
        else:
            side.seal("g", 0, 1, 2, num_samples=3)
            stack.rig.wait(lambda: side.frontier.planned == 1, f"a plan of {side.run}")
            side.damage(_DAMAGED)
            request = request_replan(side.client, side.run)
            stack.doom(failpoint)
            done = await_replan(side.client, side.run, request, wait_s=30)
            assert done.dead == (_DAMAGED,)
        side.wait_for({"accepted": 3, "planned": 2, "dead": 1})


def _seal_with_damage(side: Side) -> None:
    side.seal("g", 0, 1, num_samples=3)
    side.damage(_DAMAGED)
    side.seal("g", 2, num_samples=3)


def kill_a_discard(stack: Stack) -> None:
    """A second command completes a discard whose process died."""
    failpoint = _draw(stack, kill_a_discard)
    with side_run(stack) as side:
        _seal_with_damage(side)
        side.wait_for({"accepted": 3, "planned": 2, "dead": 1})
        _command_that_dies(stack, failpoint, "dead", "discard", side.run, _DAMAGED)
        assert not side.client.exists(keys.trajectory_keys(side.run, _DAMAGED).turns)
        assert not side.client.hexists(keys.run_keys(side.run).held, _DAMAGED)
        assert not read_dead_letters(side.client, side.run).trajectories
        side.wait_for({"accepted": 3, "planned": 2, "dead": 1})


def kill_a_deletion(stack: Stack) -> None:
    """The name is used again at once; the next deletion removes both runs."""
    failpoint = _draw(stack, kill_a_deletion)
    with side_run(stack) as side:
        for group in ("g", "h"):
            side.seal(group, 0, 1, num_samples=2)
        words = ("run", "delete", side.run, "--yes")
        _killed_command(stack, failpoint, *words)
        side.create_again()
        side.seal("g", 0, 1, num_samples=2)
        newest = dataclasses.replace(side, run=find_run(side.client, side.run))
        newest.wait_for({"accepted": 2, "planned": 2})
        _command(stack, *words)
        assert not [run for run in list_runs(side.client) if run.name == side.run]
        assert not list(side.client.scan_iter(f"ts:{{{side.run}/*:turns"))
        side.create_again()


def kill_a_fork(stack: Stack) -> None:
    """Of the run that is trained, at its newest checkpoint; nobody generates for the new run."""
    failpoint = _draw(stack, kill_a_fork)
    client, run = stack.rig.client, stack.rig.run
    step = read_frontier(client, run).committed
    stack.num_sides += 1
    new_run, token = f"side-{stack.num_sides}", stack.rig.folder / "fork.token"
    token.write_text(str(token_of_step(client, run, step)))
    _command_that_dies(stack, failpoint, "run", "fork", run, new_run, "--token-file", str(token))
    states = read_states(client, new_run)
    states.counts.check()
    assert states.frontier.origin is not None
    assert (states.frontier.origin.run, states.frontier.origin.step) == (run, step)
    assert (states.frontier.planned, states.frontier.has_inherited) == (step, True)
    delete_run(client, new_run)


def _command_that_dies(stack: Stack, failpoint: str, *words: str) -> None:
    """A command of `turnstream`, once with a failpoint and again without.

    Raises:
        InVainError: the first came to its end.
    """
    _killed_command(stack, failpoint, *words)
    _command(stack, *words)


def _killed_command(stack: Stack, failpoint: str, *words: str) -> None:
    """A command of `turnstream` with a failpoint.

    Raises:
        InVainError: it was not killed.
    """
    doomed = _start_command(stack, failpoint, *words)
    doomed.wait(_COMMAND_S)
    stack.note(failpoint, doomed)


def _command(stack: Stack, *words: str) -> None:
    """A command of `turnstream`, which succeeds."""
    running = _start_command(stack, "", *words)
    running.wait(_COMMAND_S)
    running.check()


def _start_command(stack: Stack, failpoint: str, *words: str) -> Service:
    command = [sys.executable, "-P", "-m", "turnstream_server.cli", *words]
    return stack.rig.keep(stack.rig.stack(failpoint).start_program(words[0], command))


def kill_a_rank_at_a_failpoint(stack: Stack) -> None:
    """Between the acknowledgements, or while it writes its checkpoint."""
    failpoint = _draw(stack, kill_a_rank_at_a_failpoint)
    stack.start_ranks(f"{failpoint}@{stack.rng.randint(1, 3)}")
    first = stack.rig.ranks[0]  # which acknowledges

    def has_fallen() -> bool:
        stack.mend_services()
        return first.status is not None

    stack.rig.wait(has_fallen, f"a rank that falls at {failpoint}", timeout_s=90.0)
    stack.note(failpoint, first)


def _draw(stack: Stack, fault: Callable[[Stack], None]) -> str:
    return stack.draws.draw(fault.__name__, FAILPOINTS[fault])


FAILPOINTS: Final[Mapping[Callable[[Stack], None], tuple[str, ...]]] = {
    kill_a_batcher_that_plans: (
        "plan.before_check",
        "plan.before_write",
        "plan.after_write",
        "batch_due.before",
        "batch_due.after",
    ),
    kill_a_batcher_that_serves: (
        "session.before_start",
        "session.after_start",
        "get.after_header",
        "get.after_data",
        "stepped.before",
        "stepped.after",
        "committed.before",
        "committed.after",
    ),
    kill_a_batcher_that_revises: ("revise.before", "revise.after"),
    kill_a_batcher_that_decides: (
        "give_up.before",
        "give_up.after",
        "grant_refill.before",
        "grant_refill.after",
        "fire_deadlines.before",
        "fire_deadlines.after",
        "settle.before",
        "settle.after",
    ),
    kill_a_batcher_that_ends_a_run: ("finish_run.before", "finish_run.after"),
    kill_a_batcher_that_finds_damage: (
        "mark_dead.before",
        "mark_dead.after",
        "replan.before_write",
        "replan.after_write",
    ),
    kill_a_discard: ("discard.after_entry", "discard.after_payload"),
    kill_a_deletion: ("delete.after_condemned", "delete.after_slice", "delete.after_payload"),
    kill_a_fork: ("fork.after_made",),
    kill_a_rank_at_a_failpoint: (
        "train.after_update",
        "train.after_stepped",
        "checkpoint.after_weights",
        "checkpoint.before_committed",
        "checkpoint.after_committed",
    ),
}
"""Where each of them lets a process die; each place comes once before any comes again."""
