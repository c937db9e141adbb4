"""Rules over several settings of a run, and over a change of them.

The first broken rule names the setting to change. Settings with which no batch would ever be
complete are refused too. Settings without effect are refused in new runs and in revisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from turnstream.errors import InvalidConfigError

if TYPE_CHECKING:
    from turnstream.batching.config.batching_config import BatchingConfig


class Problem(NamedTuple):
    """A setting that must change, and why."""

    field: str
    message: str


LEAST_GROUP_BYTES = 4096
"""`max_bytes` counts so much for a group of one trajectory without any token."""

UNPLANNABLE_ESTIMATORS = {
    "optimal_token_baseline": "it needs the probabilities of every token of a whole group, which "
    "no plan has and no rank alone: use 'opo', the same baseline for whole trajectories. Its "
    "baseline_weight names a metric of a trajectory, such as the sum of 1 - 2 * p + sum(p * p) "
    "over its tokens",
}
"""Estimators that a plan cannot compute because it reads no token, and the way to use each."""

FIXED: Final = {
    "extra_columns": "generators learn it once, and turns that are stored were checked by it",
    "aggregation": "a trainer chooses its loss by it when its session begins",
    "row_weights": "a trainer refuses rows that weigh otherwise than when its session began",
}
"""Settings that a run keeps, and the harm of a change."""

_FIXED_WITH_GAE: Final = {
    "estimator": "a trainer has a critic for 'gae' alone",
    "reward_source": "a trainer with a critic places rewards by it when its session begins",
}
"""Settings that a run with the estimator "gae" keeps, and the harm of a change."""

_NO_PENALTY = {
    "gdpo": "it compares components one by one; give the penalty as one of them",
    "maxrl": "it divides by the mean reward, and a penalty makes rewards negative",
}
"""Estimators whose rewards cannot take a penalty or a reward for their length, and why."""

_NORMALIZED = ("gdpo", "reinforce_pp", "reinforce_pp_baseline")
"""Estimators that normalise over the batch by their definition."""

_READERS = {
    "turn_weight": ("estimator", "gigpo", 1.0),
    "turn_discount": ("estimator", "gigpo", 1.0),
    "divide_by_std": ("estimator", "gigpo", True),
    "pass_k": ("estimator", "pass_at_k", 1),
    "baseline_weight": ("estimator", "opo", ""),
    "cost_per_token": ("micro_batch_cost", "quadratic", 1.0),
    "cost_per_squared_token": ("micro_batch_cost", "quadratic", 0.0),
}
"""Settings that one value of another setting reads, with their value for all others."""

_WEIGHTLESS = {
    "token_mean": "it counts tokens alike, whatever row they are in",
    "rollout_mean": "it divides by the trajectory's tokens already",
    "prompt_mean": "it divides by the group's tokens already",
}
"""Aggregations that do not divide by the sum of weights, and why row weights distort them."""

_NO_SINGLETON = {
    "gae": "the trainer estimates every advantage by its critic",
    "reinforce_pp": "it compares no group",
    "remax": "a group has a greedy sample and another one",
}
"""Estimators that never compute the advantage in a group of one, and why."""

_SHORTEST_ROW = 2
"""Tokens of the shortest row that trains: one of the prompt and one of the response."""


def config_problems(config: BatchingConfig) -> Iterator[Problem]:
    """Yield every broken rule; each single value is valid already."""
    yield from _unread_problems(config)
    yield from _group_problems(config)
    yield from _estimator_problems(config)
    yield from _loss_problems(config)
    yield from _pass_problems(config)
    yield from _length_problems(config)
    yield from _age_problems(config)
    yield from _deadline_problems(config)


def unread_settings(config: BatchingConfig) -> Iterator[Problem]:
    """Yield settings without effect. An older release accepted them, so a stored run may have some.

    >>> from turnstream.batching.config import BatchingConfig
    >>> list(unread_settings(BatchingConfig(batch_groups=2, mini_batch_groups=2)))
    []
    """
    reason = _NO_SINGLETON.get(config.estimator)
    if config.singleton_advantage != "zero" and reason:
        yield Problem(
            "singleton_advantage",
            f"{config.singleton_advantage!r} is not read by estimator={config.estimator!r}: "
            f"{reason}",
        )
    if config.turn_discount != 1.0 and config.turn_weight == 0.0:
        yield Problem("turn_discount", f"{config.turn_discount:g} is not read with turn_weight=0")
    if config.refill_fallback != "drop" and config.deadline_policy != "refill":
        yield Problem(
            "refill_fallback",
            f"{config.refill_fallback!r} is not read with deadline_policy="
            f"{config.deadline_policy!r}",
        )


def _unread_problems(config: BatchingConfig) -> Iterator[Problem]:
    for name, (other, reader, unread) in _READERS.items():
        value, chosen = getattr(config, name), getattr(config, other)
        if chosen != reader and value != unread:
            yield Problem(
                name, f"{value} does not go with {other}={chosen!r}: only {reader} reads it"
            )
    if config.correct_reward != 1.0 and not config.length_reward_weight:
        yield Problem(
            "correct_reward", f"{config.correct_reward:g} without length_reward_weight does nothing"
        )


def _group_problems(config: BatchingConfig) -> Iterator[Problem]:
    groups = config.batch_groups
    if groups % config.mini_batch_groups:
        yield Problem(
            "mini_batch_groups",
            f"{config.mini_batch_groups} does not divide batch_groups={groups}",
        )
    if 0 < config.max_bytes < groups * LEAST_GROUP_BYTES:
        yield Problem(
            "max_bytes",
            f"{config.max_bytes} never holds the {groups} groups of a step, each of "
            f"{LEAST_GROUP_BYTES} bytes at least",
        )
    if config.surplus == "keep" and 0 < config.max_open_groups < groups:
        yield Problem(
            "max_open_groups",
            f"{config.max_open_groups} with surplus='keep' never fills a batch of "
            f"batch_groups={groups}: complete groups stay open until they are planned",
        )


def _estimator_problems(config: BatchingConfig) -> Iterator[Problem]:
    estimator, weights = config.estimator, config.component_weights
    refused = f"does not go with estimator={estimator!r}"
    if (estimator == "gdpo") != (len(weights) >= 2) or len(weights) == 1:
        yield Problem(
            "component_weights",
            f"{len(weights)} do not go with estimator={estimator!r}: "
            "gdpo takes two or more, the others none",
        )
    if weights and not any(weight for _, weight in weights):
        yield Problem("component_weights", f"{weights!r} are all 0, and so is every advantage")
    if estimator == "reinforce_pp" and config.reward_source != "outcome":
        yield Problem(
            "reward_source",
            f"{config.reward_source!r} {refused}: with rewards inside a trajectory its tokens "
            "have different returns, and a plan reads no token",
        )
    for name in ("overlong_buffer", "length_reward_weight"):
        if (value := getattr(config, name)) and estimator in _NO_PENALTY:
            yield Problem(name, f"{value} {refused}: {_NO_PENALTY[estimator]}")
    if estimator == "gae":
        yield from _gae_problems(config)
    if config.normalize_advantages != "none" and estimator in _NORMALIZED:
        yield Problem(
            "normalize_advantages",
            f"{config.normalize_advantages!r} {refused}: it normalises over the batch already",
        )
    if estimator == "pass_at_k" and not 2 <= config.pass_k <= config.max_samples:
        yield Problem(
            "pass_k",
            f"{config.pass_k} {refused}: it is from 2 to max_samples={config.max_samples}, and "
            "the mean reward, pass@1, is trained by 'rloo'",
        )


def _gae_problems(config: BatchingConfig) -> Iterator[Problem]:
    refused = "does not go with estimator='gae'"
    if not config.merge:
        yield Problem("merge", f"False {refused}: it follows the tokens of all turns in one row")
    if config.length_reward_weight:
        yield Problem(
            "length_reward_weight",
            f"{config.length_reward_weight} {refused}: it depends on the group, and the trainer "
            "reads the reward of each trajectory alone: use overlong_buffer",
        )
    if config.normalize_advantages != "none":
        yield Problem(
            "normalize_advantages",
            f"{config.normalize_advantages!r} {refused}: the trainer whitens its advantages",
        )


def _loss_problems(config: BatchingConfig) -> Iterator[Problem]:
    aggregation, row_weights = config.aggregation, config.row_weights
    refused = f"does not go with aggregation={aggregation!r}"
    if (aggregation == "constant") != (config.length_constant > 0):
        yield Problem("length_constant", f"{config.length_constant} {refused}")
    if row_weights != "per_row" and aggregation in _WEIGHTLESS:
        yield Problem("row_weights", f"{row_weights!r} {refused}: {_WEIGHTLESS[aggregation]}")
    if row_weights == "rollout_mean" and aggregation != "seq_mean_token_mean":
        yield Problem(
            "row_weights",
            f"{row_weights!r} {refused}: a row's sum of tokens would count its length twice",
        )


def _pass_problems(config: BatchingConfig) -> Iterator[Problem]:
    limit = config.max_tokens_per_micro_batch
    if config.packing_method != "best_fit_decreasing" and not limit:
        yield Problem(
            "packing_method",
            f"{config.packing_method!r} without max_tokens_per_micro_batch packs nothing",
        )
    if config.packing_method != "best_fit_decreasing" and config.micro_batch_cost == "padded":
        yield Problem(
            "packing_method",
            f"{config.packing_method!r} does not go with micro_batch_cost='padded': padded passes "
            "take rows from short to long",
        )
    if config.over_long != "refuse":
        return
    if limit == 0:
        yield Problem("over_long", "'refuse' without max_tokens_per_micro_batch refuses nothing")
    elif (cost := config.budget.cost([_SHORTEST_ROW])) > limit:
        yield Problem(
            "max_tokens_per_micro_batch",
            f"{limit} with over_long='refuse' refuses every trajectory: the shortest row, of "
            f"{_SHORTEST_ROW} tokens, costs {cost:g}",
        )


def _length_problems(config: BatchingConfig) -> Iterator[Problem]:
    length, buffer = config.overlong_length, config.overlong_buffer
    if buffer > length:
        yield Problem("overlong_buffer", f"{buffer} is more than overlong_length={length}")
    if length and not (buffer or config.mask_truncated):
        yield Problem(
            "overlong_length",
            f"{length} without overlong_buffer and mask_truncated does nothing",
        )
    masks = config.mask_truncated or config.error_trajectories == "mask"
    if config.masked_reward != "keep" and not masks:
        yield Problem(
            "masked_reward",
            f"{config.masked_reward!r} without mask_truncated and error_trajectories='mask' does "
            "nothing",
        )


def _age_problems(config: BatchingConfig) -> Iterator[Problem]:
    policy, staleness = config.max_age_policy, config.max_staleness
    ahead = config.max_planned_ahead
    if staleness == 0 and ahead > 0:
        yield Problem(
            "max_planned_ahead", f"{ahead} plans from older weights, but max_staleness is 0"
        )
    if policy != "keep" and staleness == 0:
        yield Problem(
            "max_age_policy",
            f"{policy!r} needs max_staleness >= 1: with 0 every group that began "
            "before the newest weights would expire; allow 1, or use 'keep'",
        )
    if policy != "keep" and ahead > staleness:
        yield Problem(
            "max_age_policy",
            f"{policy!r} with max_planned_ahead={ahead} expires "
            "everything: the newest weights are so many steps old when a batch is planned, and "
            f"max_staleness={staleness}",
        )


def _deadline_problems(config: BatchingConfig) -> Iterator[Problem]:
    policy = config.deadline_policy
    if (policy == "refill") != (config.max_refills > 0):
        yield Problem(
            "max_refills", f"{config.max_refills} does not go with deadline_policy={policy!r}"
        )
    if policy == "train_short" and not (config.group_deadline_s or config.reward_deadline_s):
        yield Problem(
            "deadline_policy",
            "'train_short' needs a group_deadline_s or a reward_deadline_s above 0",
        )


class Change(NamedTuple):
    """One setting that differs."""

    name: str
    before: Any
    after: Any


def changed_settings(before: BatchingConfig, after: BatchingConfig) -> tuple[Change, ...]:
    """Return the settings that differ, in their order."""
    pairs = [(f.name, getattr(before, f.name), getattr(after, f.name)) for f in fields(after)]
    return tuple(Change(*pair) for pair in pairs if pair[1] != pair[2])


def check_revision(before: BatchingConfig, after: BatchingConfig) -> None:
    """Refuse a change of a setting that a run keeps, or to one without effect."""
    known = set(unread_settings(before))
    for problem in unread_settings(after):
        if problem not in known:
            raise InvalidConfigError(*problem)
    has_critic = "gae" in (before.estimator, after.estimator)
    fixed = FIXED | _FIXED_WITH_GAE if has_critic else FIXED
    for change in changed_settings(before, after):
        if change.name in fixed:
            raise InvalidConfigError(
                change.name,
                f"it cannot be revised from {change.before!r} to {change.after!r}: "
                f"{fixed[change.name]}; begin another run",
            )
