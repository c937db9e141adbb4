"""Guards of which rows a step has: planning, assembling, mini-batches."""

from __future__ import annotations

from mutations.mutation import Mutation

ROWS = (
    # ----------------------------------------------------------------------------------
    # planning and assembling
    Mutation(
        "a rank may have fewer rows than passes",
        "rows/minibatch.py",
        "math.lcm(mini_batch_rows, dp_world_size * passes_multiple_of)",
        "math.lcm(mini_batch_rows, dp_world_size)",
        ("test_minibatch",),
    ),
    Mutation(
        "tokens of a masked version are trained",
        "merge/columns.py",
        "kept *= ~np.repeat(is_old",
        "kept *= np.repeat(is_old | True",
        ("test_assemble",),
    ),
    Mutation(
        "a choice is made anew while it stands",
        "planning/selection.py",
        "if self.choice is None and event.step > self._last_step:",
        "if event.step > self._last_step:",
        ("test_selection",),
    ),
    Mutation(
        "a choice is made for a step that has a plan",
        "planning/selection.py",
        "if self.choice is None and event.step > self._last_step:",
        "if self.choice is None:",
        ("test_selection",),
    ),
    Mutation(
        "a choice outlives a dead member",
        "planning/selection.py",
        "if own is not None and own not in fold.ready:",
        "if False:",
        ("test_selection",),
    ),
    Mutation(
        "a choice outlives a member that joined",
        "planning/selection.py",
        "case TrajectoryDied() | SealedTrajectory() | RewardPosted():",
        "case TrajectoryDied():",
        ("test_selection",),
    ),
    Mutation(
        "a dead lineage ages from where it ended",
        "fold/staleness.py",
        "min(made, step) for",
        "made for",
        ("test_staleness",),
    ),
    Mutation(
        "a masked row is trained",
        "merge/columns.py",
        "np.repeat(is_live_B, mask.lengths)",
        "np.repeat(is_live_B | True, mask.lengths)",
        ("test_assemble",),
    ),
    Mutation(
        "a reward that was left out is compared",
        "planning/plan_batch.py",
        "[m for m in members if is_compared(m.sealed, config)]",
        "list(members)",
        ("test_planning",),
    ),
    Mutation(
        "a row that no pass can take is planned",
        "scoring/filters.py",
        "if cost > budget.limit:",
        "if False:",
        ("test_lengths",),
    ),
    Mutation(
        "a short batch is planned while more groups may come",
        "planning/plan_batch.py",
        "return num_ready if is_final else 0",
        "return num_ready",
        ("test_planning",),
    ),
    Mutation(
        "event ids are compared as text",
        "planning/plan_batch.py",
        "max([revised_at, *(g.completed_by for g in ready)], key=event_order)",
        "max([revised_at, *(g.completed_by for g in ready)])",
        ("test_planning",),
    ),
    Mutation(
        "row ids of two mini-batches overlap",
        "planning/plan_batch.py",
        "first_row_id += len(rows)",
        "first_row_id += len(part)",
        ("test_planning",),
    ),
    Mutation(
        "a payload of other checksums is assembled",
        "rows/assemble.py",
        "if found != trajectory.payload_crcs:",
        "if len(found) != len(trajectory.payload_crcs):",
        ("test_assemble",),
    ),
    Mutation(
        "rows of other lengths than planned are assembled",
        "rows/assemble.py",
        "if found != row[1:]:",
        "if False:",
        ("test_assemble",),
    ),
    # ----------------------------------------------------------------------------------
    # mini-batches
    Mutation(
        "inert rows get a live mask",
        "rows/plain_rows.py",
        "Ragged(np.zeros(num_rows, np.uint8), ones)",
        "Ragged(np.ones(num_rows, np.uint8), ones)",
        ("test_minibatch",),
    ),
    Mutation(
        "inert rows weigh as much as others",
        "rows/plain_rows.py",
        "weight=np.zeros(num_rows, np.float32)",
        "weight=np.ones(num_rows, np.float32)",
        ("test_minibatch",),
    ),
    Mutation(
        "inert rows pass for real ones",
        "rows/plain_rows.py",
        "is_padding=np.ones(num_rows, np.bool_)",
        "is_padding=np.zeros(num_rows, np.bool_)",
        ("test_minibatch",),
    ),
    Mutation(
        "two inert rows have one id",
        "rows/plain_rows.py",
        "<< _POSITION_BITS) | position)",
        "<< _POSITION_BITS))",
        ("test_minibatch",),
    ),
    Mutation(
        "rows divide by the largest size instead of all of them",
        "rows/minibatch.py",
        "return math.lcm(mini_batch_rows, dp_world_size * passes_multiple_of)",
        "return max(mini_batch_rows, dp_world_size * passes_multiple_of)",
        ("test_minibatch",),
    ),
    Mutation(
        "ranks get different numbers of rows",
        "rows/minibatch.py",
        "num_parts=dp_world_size, method=budget.balancing, equal_count=True)",
        "num_parts=dp_world_size, method=budget.balancing)",
        ("test_minibatch",),
    ),
)
