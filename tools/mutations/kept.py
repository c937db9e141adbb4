"""Guards of what is trained at all: filters, ages, capacity; and of the report on it."""

from __future__ import annotations

from mutations.mutation import Mutation

KEPT = (
    # ----------------------------------------------------------------------------------
    # filters
    Mutation(
        "a group of one is filtered for its lack of variance",
        "scoring/filters.py",
        "return len(rewards) > 1 and max",
        "return max",
        ("test_rewards",),
    ),
    Mutation(
        "rewards that differ by rounding pass for signal",
        "scoring/filters.py",
        "min(rewards) <= ZERO_VARIANCE_TOLERANCE",
        "min(rewards) == 0",
        ("test_rewards",),
    ),
    Mutation(
        "a row without a trained token weighs something",
        "scoring/filters.py",
        'bool(count) if kind == "per_trajectory" else count',
        '1 if kind == "per_trajectory" else count',
        ("test_rewards",),
    ),
    Mutation(
        "an aborted episode passes for a whole one",
        "scoring/filters.py",
        "trajectory.status in (Status.TRUNCATED, Status.ABORTED)",
        "trajectory.status in (Status.TRUNCATED,)",
        ("test_lengths",),
    ),
    Mutation(
        "the penalty of a long response has no end",
        "scoring/filters.py",
        "return max(min(-excess / buffer_tokens, 0.0), -1.0)",
        "return min(-excess / buffer_tokens, 0.0)",
        ("test_rewards",),
    ),
    Mutation(
        "the penalty of a short response is a bonus",
        "scoring/filters.py",
        "return max(min(-excess / buffer_tokens, 0.0), -1.0)",
        "return max(-excess / buffer_tokens, -1.0)",
        ("test_rewards",),
    ),
    Mutation(
        "a token without a version is masked for its age",
        "merge/columns.py",
        "np.isin(columns.run_versions.values, list(masked_versions))",
        "np.isin(columns.run_versions.values, [-1, *masked_versions])",
        ("test_staleness",),
    ),
    Mutation(
        "masking changes the mask that was given",
        "merge/columns.py",
        "kept = mask.values * np.repeat(",
        "kept = mask.values\n    kept *= np.repeat(",
        ("test_staleness",),
    ),
    # ----------------------------------------------------------------------------------
    # staleness
    Mutation(
        "a token is a step older than it is",
        "fold/staleness.py",
        "train_step - 1 - self._made_by(version) >",
        "train_step - self._made_by(version) >",
        ("test_staleness",),
    ),
    Mutation(
        "a token of the greatest age allowed is masked",
        "fold/staleness.py",
        "> max_age",
        ">= max_age",
        ("test_staleness",),
    ),
    # ----------------------------------------------------------------------------------
    # capacity
    Mutation(
        "capacity is negative",
        "fold/capacity.py",
        "return max(0, num_groups)",
        "return num_groups",
        ("test_capacity",),
    ),
    Mutation(
        "capacity forgets the groups under way",
        "fold/capacity.py",
        "most_live - num_decided - num_open",
        "most_live - num_decided",
        ("test_capacity",),
    ),
    Mutation(
        "capacity forgets the groups that engines can work on",
        "fold/capacity.py",
        "num_groups = min(num_groups, max_open - num_open)",
        "pass",
        ("test_capacity",),
    ),
    Mutation(
        "steps before a revision of the batch size count as those after it",
        "fold/capacity.py",
        "* batch_groups + num_revised",
        "* batch_groups",
        ("test_capacity",),
    ),
    # ----------------------------------------------------------------------------------
    # operations
    Mutation(
        "operations of different losses share a pass",
        "rows/operations.py",
        "kind = operation.loss, ",
        "kind = ",
        ("test_operations",),
    ),
    Mutation(
        "an operation is answered with what inert rows sum to",
        "rows/operations.py",
        "if request_id:  # an inert row has none",
        "if True:",
        ("test_operations",),
    ),
    # ----------------------------------------------------------------------------------
    # reports
    Mutation(
        "groups of one are not counted",
        "planning/report.py",
        "compares_groups and len(group.trajectories) == 1",
        "0",
        ("test_report",),
    ),
    Mutation(
        "groups of one are counted where that was meant",
        "planning/report.py",
        "compares_groups and len(group.trajectories) == 1",
        "len(group.trajectories) == 1",
        ("test_report",),
    ),
    Mutation(
        "rows without a trained token are not counted",
        "planning/report.py",
        '"rows without a trained token": _num_untrained_rows(manifest)',
        '"rows without a trained token": 0',
        ("test_report",),
    ),
    Mutation(
        "rows that the run masks are counted as untrained",
        "planning/report.py",
        "        if not trajectory.is_masked\n",
        "",
        ("test_report",),
    ),
    Mutation(
        "a row is measured by its length, whatever it costs",
        "planning/report.py",
        "budget.cost([row.num_tokens]) >",
        "row.num_tokens >",
        ("test_report",),
    ),
    Mutation(
        "updates of nothing are not counted",
        "planning/report.py",
        "            cut.denominators.num_tokens == 0 for cut in cuts\n",
        "            False for cut in cuts\n",
        ("test_report",),
    ),
    Mutation(
        "a row as long as the limit is counted",
        "planning/report.py",
        "budget.cost([row.num_tokens]) > budget.limit",
        "budget.cost([row.num_tokens]) >= budget.limit",
        ("test_report",),
    ),
    Mutation(
        "no limit is a limit of 0",
        "planning/report.py",
        "if not 0 < budget.limit < budget.cost([longest]):",
        "if not budget.limit < budget.cost([longest]):",
        ("test_report",),
    ),
)
