"""Guards of pass@k, of greedy samples, of normalised advantages and of rewards for length."""

from __future__ import annotations

from mutations.mutation import Mutation

_ADVANTAGES = "scoring/advantages.py"
_MEMBERS = "fold/members.py"
_PLAN = "planning/plan_batch.py"
_REWARDS = "scoring/rewards.py"
_RULES = "config/rules.py"

ESTIMATORS = (
    # ----------------------------------------------------------------------------------
    # advantages
    Mutation(
        "a group smaller than k has a factor for no gap",
        _ADVANTAGES,
        "min(pass_k, len(group.rewards))",
        "pass_k",
        ("test_advantages",),
    ),
    Mutation(
        "pass@k of one sample is computed",
        _ADVANTAGES,
        "    if k < 2:\n",
        "    if False:\n",
        ("test_advantages",),
    ),
    Mutation(
        "pass@k forgets which subsets have no larger reward",
        _ADVANTAGES,
        "factor *= (m - k + 1) / m",
        "factor *= (m - k + 1) / (m + 1)",
        ("test_advantages",),
    ),
    Mutation(
        "pass@k has the scale of a sum over the group",
        _ADVANTAGES,
        "    factor = float(k)\n",
        "    factor = 1.0\n",
        ("test_advantages",),
    ),
    Mutation(
        "only estimators that are whitened by definition are whitened",
        _ADVANTAGES,
        'if normalize == "none" and estimator not in NORMALIZED:',
        "if estimator not in NORMALIZED:",
        ("test_advantages",),
    ),
    Mutation(
        "a baseline by a metric weighs tokens",
        _ADVANTAGES,
        "group.num_tokens if group.baseline_weights is None else group.baseline_weights",
        "group.num_tokens",
        ("test_advantages",),
    ),
    Mutation(
        "the greedy sample is compared with the others",
        _ADVANTAGES,
        '"remax": lambda group: group.rewards - group.rewards[0],',
        '"remax": lambda group: _leave_one_out_mean(group.rewards),',
        ("test_advantages",),
    ),
    # ----------------------------------------------------------------------------------
    # plans
    Mutation(
        "turns are not normalised",
        _PLAN,
        '    if config.normalize_advantages == "batch":\n',
        "    if False:\n",
        ("test_turn_advantages",),
    ),
    Mutation(
        "turns are normalised with tokens that the plan masks",
        _PLAN,
        "return _Member(member, False, sequences, num_trainable, versions, lost)",
        "return _Member(member, False, sequences, num_trainable, versions)",
        ("test_turn_advantages",),
    ),
    Mutation(
        "a group without a greedy sample is planned",
        _PLAN,
        "if sealed and config.has_greedy_sample and not is_greedy(sealed[0], config):",
        "if False:",
        ("test_greedy_sample",),
    ),
    Mutation(
        "the length reward of a turn is forgotten",
        _PLAN,
        "        own[-1] += shaped\n",
        "        pass\n",
        ("test_length_rewards",),
    ),
    Mutation(
        "the estimator does not see the length reward",
        _PLAN,
        "rewards += length_rewards(sealed, config)",
        "rewards += 0.0",
        ("test_length_rewards",),
    ),
    Mutation(
        "a baseline by a metric weighs lengths",
        _PLAN,
        "m.sealed.metrics[name] if name else m.num_trainable_tokens",
        "m.num_trainable_tokens",
        ("test_planning",),
    ),
    # ----------------------------------------------------------------------------------
    # greedy samples
    Mutation(
        "the greedy sample is trained",
        "scoring/filters.py",
        "return is_greedy(trajectory, config) or _is_cut_off(trajectory, config)",
        "return _is_cut_off(trajectory, config)",
        ("test_greedy_sample",),
    ),
    Mutation(
        "the greedy sample is left out with masked ones",
        "scoring/filters.py",
        'config.masked_reward == "keep" or not _is_cut_off(trajectory, config)',
        'config.masked_reward == "keep" or not is_masked(trajectory, config)',
        ("test_greedy_sample",),
    ),
    Mutation(
        "a group is decided without its greedy sample",
        _MEMBERS,
        "return not is_short and not self.awaits_greedy(config)",
        "return not is_short",
        ("test_greedy_sample",),
    ),
    Mutation(
        "a group of a greedy sample alone waits for ever",
        _MEMBERS,
        "return num_known >= self.opened.num_samples and not self.pending()",
        "return bool(self.ended) and not self.pending()",
        ("test_greedy_sample",),
    ),
    Mutation(
        "a greedy sample is trained alone",
        _MEMBERS,
        "needed = 2 if config.has_greedy_sample else",
        "needed = 1 if config.has_greedy_sample else",
        ("test_greedy_sample",),
    ),
    Mutation(
        "a group is compared with no greedy sample",
        _MEMBERS,
        "if config.has_greedy_sample and not any(",
        "if False and not any(",
        ("test_greedy_sample",),
    ),
    Mutation(
        "a lost greedy sample is spared",
        _MEMBERS,
        "least = int(config.has_greedy_sample and GREEDY_SAMPLE in lost)",
        "least = 0",
        ("test_greedy_sample",),
    ),
    Mutation(
        "a hanging greedy sample is spared",
        _MEMBERS,
        "max(int(first in overdue), num_missing)",
        "max(0, num_missing)",
        ("test_greedy_sample",),
    ),
    Mutation(
        "an ended sample is refilled before the greedy one",
        _MEMBERS,
        "(sample != first, sample not in self.ended)",
        "(sample not in self.ended, sample != first)",
        ("test_greedy_sample",),
    ),
    Mutation(
        "a greedy sample counts as one that trains",
        "scoring/group_filters.py",
        "(1 if config.has_greedy_sample else 2)",
        "2",
        ("test_greedy_sample",),
    ),
    # ----------------------------------------------------------------------------------
    # rewards and settings
    Mutation(
        "an incorrect response gains by its length",
        _REWARDS,
        "reward if _is_correct(each, config) else min(0.0, reward)",
        "reward",
        ("test_length_rewards",),
    ),
    Mutation(
        "the weight of the length reward is forgotten",
        _REWARDS,
        "config.length_reward_weight * (reward",
        "(reward",
        ("test_length_rewards",),
    ),
    Mutation(
        "equal lengths are divided by 0",
        _REWARDS,
        "if not config.length_reward_weight or shortest == longest:",
        "if not config.length_reward_weight:",
        ("test_length_rewards",),
    ),
    Mutation(
        "a response at the bound is incorrect",
        _REWARDS,
        "reward >= config.correct_reward",
        "reward > config.correct_reward",
        ("test_length_rewards",),
    ),
    Mutation(
        "a member without a weight is compared",
        _REWARDS,
        "_weight_problem(trajectory, config) if config.baseline_weight else",
        '"" if config.baseline_weight else',
        ("test_rewards",),
    ),
    Mutation(
        "a baseline has a negative weight",
        _REWARDS,
        "if 0 <= weight <= MAX_REWARD",
        "if weight <= MAX_REWARD",
        ("test_rewards",),
    ),
    Mutation(
        "advantages are normalised twice",
        _RULES,
        'if config.normalize_advantages != "none" and estimator in _NORMALIZED:',
        "if False:",
        ("test_config_estimators",),
    ),
    Mutation(
        "pass@k has no k",
        _RULES,
        'if estimator == "pass_at_k" and not 2 <= config.pass_k <= config.max_samples:',
        "if False:",
        ("test_config_estimators",),
    ),
    Mutation(
        "a bound that no reward reads is taken",
        _RULES,
        "if config.correct_reward != 1.0 and not config.length_reward_weight:",
        "if False:",
        ("test_config_estimators",),
    ),
    # ----------------------------------------------------------------------------------
    # gae
    Mutation(
        "a plan compares the rewards of a run with a critic",
        _ADVANTAGES,
        '    if estimator == "gae":\n',
        "    if False:\n",
        ("test_planning",),
    ),
    Mutation(
        "a trajectory of several rows is trained with a critic",
        _MEMBERS,
        "problem or chain_problem(sealed, config) or",
        "problem or",
        ("test_readiness",),
    ),
    Mutation(
        "a run gets a critic, or loses it, by a revision",
        _RULES,
        'has_critic = "gae" in (before.estimator, after.estimator)',
        "has_critic = False",
        ("test_revising",),
    ),
    Mutation(
        "the penalty of a length is lost among the rewards of turns",
        "scoring/token_advantages.py",
        "Ragged(of_turns.values + on_last.values, of_turns.offsets)",
        "of_turns",
        ("test_token_advantages",),
    ),
    Mutation(
        "the name of a metric is a number",
        "config/values.py",
        "    if hint is str and not isinstance(value, str):\n",
        "    if False:\n",
        ("test_config_estimators",),
    ),
)
