"""Guards of the numbers: advantages, denominators, filters and ages."""

from __future__ import annotations

from mutations.mutation import Mutation

SCORES = (
    # ----------------------------------------------------------------------------------
    # advantages, rewards
    Mutation(
        "GRPO divides by the n of a population",
        "advantages.py",
        "def _grpo(rewards: FloatArray, *, ddof: int = 1)",
        "def _grpo(rewards: FloatArray, *, ddof: int = 0)",
        ("test_advantages",),
    ),
    Mutation(
        "equal rewards give a rounding error as advantage",
        "advantages.py",
        "    shifted = rewards - rewards[0]\n    return shifted - shifted.mean()",
        "    return rewards - rewards.mean()",
        ("test_advantages",),
    ),
    Mutation(
        "the only member of a group is trained by its raw reward unasked",
        "advantages.py",
        'if singleton == "raw" else',
        "if True else",
        ("test_advantages",),
    ),
    Mutation(
        "whitening counts trajectories instead of trained tokens",
        "advantages.py",
        "mean = np.average(shifted, weights=counts)",
        "mean = shifted.mean()",
        ("test_advantages",),
    ),
    Mutation(
        "maxrl divides by the mean of negative rewards",
        "advantages.py",
        "if (rewards < 0).any():",
        "if False:",
        ("test_advantages",),
    ),
    Mutation(
        "leave-one-out divides by a deviation of zero",
        "advantages.py",
        "if len(others) > 1 and others.min() < others.max():",
        "if len(others) > 1:",
        ("test_advantages",),
    ),
    Mutation(
        "gdpo pairs components with too few weights",
        "advantages.py",
        "if len(columns) != len(weights):",
        "if False:",
        ("test_advantages",),
    ),
    Mutation(
        "the advantage stands on observed tokens too",
        "advantages.py",
        "np.where(loss_mask.values, per_token, np.float32(0))",
        "per_token",
        ("test_advantages",),
    ),
    Mutation(
        "GAE takes a trajectory that was split into rows",
        "token_advantages.py",
        "    if len(parts):\n",
        "    if False:\n",
        ("test_token_advantages",),
    ),
    Mutation(
        "whitening counts masked tokens",
        "token_advantages.py",
        "trained = values.values[is_trained].astype(np.float64)\n    if",
        "trained = values.values.astype(np.float64)[: is_trained.sum()]\n    if",
        ("test_token_advantages",),
    ),
    Mutation(
        "a reward before the first trained token goes to another row",
        "token_advantages.py",
        "has_one = last_trained >= self._row_start",
        "has_one = last_trained >= 0",
        ("test_token_advantages",),
    ),
    Mutation(
        "a reward of an empty response vanishes",
        "rewards.py",
        "    if len(lost):\n",
        "    if False:\n",
        ("test_rewards",),
    ),
    # ----------------------------------------------------------------------------------
    # denominators
    Mutation(
        "a group without a trained token is counted",
        "denominators.py",
        "num_groups += num_sequences > sequences_before",
        "num_groups += 1",
        ("test_planning",),
    ),
    Mutation(
        "a row without a trained token is counted",
        "denominators.py",
        "num_live = sum([count > 0 for count in trained])",
        "num_live = len(trained)",
        ("test_planning",),
    ),
    Mutation(
        "a share of more than its mini-batch passes",
        "denominators.py",
        "else own > whole + tolerance",
        "else False",
        ("test_denominators",),
    ),
    Mutation(
        "the only rank may have less than its mini-batch",
        "denominators.py",
        "abs(own - whole) > tolerance if dp_world_size == 1",
        "own - whole > tolerance if dp_world_size == 1",
        ("test_denominators",),
    ),
    Mutation(
        "an inert row may weigh something",
        "denominators.py",
        "((trained_B > 0) | (rows.weight != 0))",
        "(trained_B > 0)",
        ("test_denominators",),
    ),
    Mutation(
        "an empty response takes the mask of its neighbour",
        "denominators.py",
        "filled_B = offsets[:-1] < offsets[1:]",
        "filled_B = offsets[:-1] < offsets[-1]",
        ("test_denominators",),
    ),
    # ----------------------------------------------------------------------------------
    # filters and staleness
    Mutation(
        "a group of one is filtered for its lack of variance",
        "filters.py",
        "return len(rewards) > 1 and max",
        "return max",
        ("test_filters",),
    ),
    Mutation(
        "rewards that differ by rounding pass for signal",
        "filters.py",
        "min(rewards) <= tolerance",
        "min(rewards) == 0",
        ("test_filters",),
    ),
    Mutation(
        "a row without a trained token weighs something",
        "filters.py",
        "is_live_B = num_trained_B > 0",
        "is_live_B = num_trained_B >= 0",
        ("test_filters",),
    ),
    Mutation(
        "an aborted episode passes for a whole one",
        "filters.py",
        "return status in (Status.TRUNCATED, Status.ABORTED)",
        "return status in (Status.TRUNCATED,)",
        ("test_filters",),
    ),
    Mutation(
        "the penalty of a long response has no end",
        "filters.py",
        "return -min(max(excess / buffer_tokens, 0.0), 1.0)",
        "return -max(excess / buffer_tokens, 0.0)",
        ("test_filters",),
    ),
    Mutation(
        "capacity is negative",
        "staleness.py",
        "return max(0, min(",
        "return max(-9, min(",
        ("test_staleness",),
    ),
    Mutation(
        "capacity forgets the groups under way",
        "staleness.py",
        "allowed - (num_accepted + num_running)",
        "allowed - num_accepted",
        ("test_staleness",),
    ),
    Mutation(
        "a token is a step older than it is",
        "staleness.py",
        "return train_step - 1 - step_of_version",
        "return train_step - step_of_version",
        ("test_staleness",),
    ),
    Mutation(
        "a token of the greatest age allowed is masked",
        "staleness.py",
        "> max_age",
        ">= max_age",
        ("test_staleness",),
    ),
    Mutation(
        "a masked token counts for the oldest version",
        "staleness.py",
        "if mask.any()]",
        "]",
        ("test_staleness",),
    ),
    Mutation(
        "version runs that miss tokens are taken",
        "staleness.py",
        "if covered != len(loss_mask):",
        "if False:",
        ("test_staleness",),
    ),
)
