"""The policy of a run: how groups become batches. Stored with the run, validated as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from turnstream.batching.choices import (
    CHOICES,
    Aggregation,
    DeadlinePolicy,
    Estimator,
    MaskedReward,
    MaxAgePolicy,
    RefillFallback,
    RewardSource,
    RowWeights,
    Selection,
    SingletonAdvantage,
    Surplus,
)
from turnstream.batching.config_values import (
    checked_cost,
    checked_seconds,
    require_at_least,
)
from turnstream.batching.declarations import checked_declarations
from turnstream.batching.estimators import (
    UNPLANNABLE_ESTIMATORS,
    checked_settings,
    require_plannable,
)
from turnstream.batching.microbatch import Budget, CostModel
from turnstream.batching.packing import OverLong
from turnstream.batching.progress import find_deadlock
from turnstream.errors import InvalidConfigError
from turnstream.types import DeclaredColumn

__all__ = [
    "LARGEST_GROUP",
    "LEAST_GROUP_BYTES",
    "UNPLANNABLE_ESTIMATORS",
    "Aggregation",
    "BatchingConfig",
    "DeadlinePolicy",
    "Estimator",
    "MaskedReward",
    "MaxAgePolicy",
    "RefillFallback",
    "RewardSource",
    "RowWeights",
    "Selection",
    "SingletonAdvantage",
    "Surplus",
]

LEAST_GROUP_BYTES = 4096
"""What `max_bytes` counts for a group of one trajectory of no length at all."""

LARGEST_GROUP = 8192
"""Upper bound of `max_samples`: the store runs no other command while it opens a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """How the groups of a run become the rows of a step.

    Attributes:
        batch_groups: groups of one training step.
        mini_batch_groups: groups of one optimizer update; divides `batch_groups`.
        estimator: how rewards become advantages (turnstream.batching.advantages).
        reward_source: where a trajectory's one reward comes from. "outcome" is the reward given
            at the seal; the other two read the token rewards of the turns.
        component_weights: (name, weight) of the reward components of `estimator="gdpo"`, two or
            more, kept in order of name; empty otherwise.
        singleton_advantage: of the only trajectory of a group: 0, or its raw reward.
        turn_weight: of `estimator="gigpo"`, which adds to the advantage of a trajectory so many
            times that of each turn among those of the group that began in the same state.
        turn_discount: gamma of gigpo, from 0 to 1, by which a turn counts the rewards of each turn
            after it less.
        divide_by_std: whether gigpo divides what it compares by its deviation, as grpo does, or
            takes the difference to the mean, as dr_grpo does.
        aggregation: the loss denominator the trainer uses.
        length_constant: tokens, the constant of `aggregation="constant"`; 0 otherwise.
        row_weights: what each row of a trajectory of several rows weighs in the loss: 1, an equal
            share of 1, or its share of the trajectory's trained tokens (batching.filters).
        merge: merge turns that continue each other into one row; False gives a row per turn.
        overlong_length: response tokens from which on a trajectory is too long; 0 means no limit.
        overlong_buffer: response tokens before `overlong_length` over which the reward that is
            compared falls by up to 1 (batching.filters.overlong_penalty); 0 leaves it alone.
        mask_truncated: trajectories that were truncated or aborted, or are longer than
            `overlong_length`, are in the batch with no token trained, outside every denominator.
        masked_reward: whether the reward of such a trajectory is compared with the others of its
            group: "keep", or "leave_out", and then a group needs two others to be trained.
        drop_zero_variance: groups whose rewards are all equal are filtered, not trained.
        max_staleness: steps a group may lag behind the weights it trains; bounds admission.
        max_open_groups: groups that may be under way at once, neither decided nor planned, as many
            as the engines can work on; bounds admission too (batching.capacity). 0 means no limit.
        max_samples: samples that one group may have, at most 8,192. It may be revised; groups that
            are open stay as they are. Configs stored without it have the default.
        max_age_policy: what becomes of tokens more than `max_staleness` steps older than the
            weights they would train, when their batch is planned. "keep" trains them, "mask" leaves
            them untrained, "drop" expires their group, which makes room for another. Of a version
            that nobody announced they are as old as the oldest announced one above it. A plan that
            is made ahead of the trainer is made for weights that do not exist yet: where most
            groups are as old as `max_planned_ahead`, let `max_staleness` be larger than that.
        selection: which of the complete groups a batch takes: those that were opened first, those
            whose oldest trained token is of the oldest version, or those that were complete first.
        max_planned_ahead: batches planned beyond the one that is to be stepped next, which
            itself is planned as soon as its groups are ready. 0 if `max_staleness` is 0.
        pad_token_id: written into padding positions; never read by the loss.
        max_tokens_per_micro_batch: what one forward pass may cost; 0 means no limit.
        micro_batch_cost: how a pass is computed, and so what it costs (batching.microbatch): rows x
            longest row, the sum of the rows, or a * L + b * L * L summed over their lengths L.
        cost_per_token: a of "quadratic".
        cost_per_squared_token: b of "quadratic"; a transformer of hidden size h has b / a = 1 / 6h.
        over_long: a row that costs more than a pass may has a pass "alone", or its trajectory is
            not trained: "refuse".
        alignment: every row of a packed pass begins at a multiple of so many tokens
            (batching.packed.sequence_alignment), and counts as that many in what a pass costs.
        passes_multiple_of: every rank has a multiple of so many passes, for the stages of an
            interleaved pipeline. Inert rows provide those that are missing.
        rows_multiple_of: the rows of a mini-batch on all ranks, inert ones included, are a multiple
            of this and of the number of ranks.
        extra_columns: what turns bring beside tokens, kept in order of name.
        lease_s: a writer that is silent for so long loses its open trajectories: any other may
            take them over, at least 0.3.
        takeover_s: how long after that they wait for another writer, before they are given up.
        group_deadline_s: seconds from the opening of a group, or from its newest refill, after
            which `deadline_policy` decides it; 0 means never. Counted while a batcher leads the
            run, and by no clock that can be set.
        reward_deadline_s: seconds that a sealed trajectory waits for its reward, after which the
            same policy goes on without it; 0 means for ever. Counted in the same way.
        deadline_policy: what becomes of a group whose deadline has fired. "drop": it is
            incomplete. "train_short": it trains with the members it has, two or more. "refill":
            samples that ended or hang are tried again, as are, without any deadline, samples that
            end without a valid member.
        max_refills: samples of one group that may be tried again; above 0 only with "refill".
        refill_fallback: what becomes of a group that has used up its refills.
        surplus: of a group that needs fewer members than it has samples, what becomes of those
            that are sealed later. "keep": until the group is planned they join it.
        retain_checkpoints: a session may begin after any of the last so many committed steps; what
            is older is released.
        max_dead_bytes: payload that is kept of trajectories set aside as damaged; beyond it the
            oldest are discarded.
        max_bytes: that trajectories may hold in the store, reserved or stored, until they are
            released, by our own count and 4,096 for each; new groups wait above it, unless the
            trainer waits for them. 0 means no limit but the memory of the server.
    """

    batch_groups: int
    mini_batch_groups: int
    estimator: Estimator = "grpo"
    reward_source: RewardSource = "outcome"
    component_weights: tuple[tuple[str, float], ...] = ()
    singleton_advantage: SingletonAdvantage = "zero"
    turn_weight: float = 1.0
    turn_discount: float = 1.0
    divide_by_std: bool = True
    aggregation: Aggregation = "token_mean"
    length_constant: int = 0
    row_weights: RowWeights = "per_row"
    merge: bool = True
    overlong_length: int = 0
    overlong_buffer: int = 0
    mask_truncated: bool = False
    masked_reward: MaskedReward = "keep"
    drop_zero_variance: bool = False
    max_staleness: int = 1
    max_open_groups: int = 0
    max_samples: int = 1024
    max_age_policy: MaxAgePolicy = "keep"
    selection: Selection = "ready_first"
    max_planned_ahead: int = 1
    pad_token_id: int = 0
    max_tokens_per_micro_batch: int = 0
    micro_batch_cost: CostModel = "padded"
    cost_per_token: float = 1.0
    cost_per_squared_token: float = 0.0
    over_long: OverLong = "alone"
    alignment: int = 1
    passes_multiple_of: int = 1
    rows_multiple_of: int = 1
    extra_columns: tuple[DeclaredColumn, ...] = ()
    lease_s: float = 60.0
    takeover_s: float = 0.0
    group_deadline_s: float = 0.0
    reward_deadline_s: float = 0.0
    deadline_policy: DeadlinePolicy = "drop"
    max_refills: int = 0
    refill_fallback: RefillFallback = "drop"
    surplus: Surplus = "drop"
    retain_checkpoints: int = 2
    max_dead_bytes: int = 256 * 1024 * 1024
    max_bytes: int = 0

    def __post_init__(self) -> None:
        """Check every field and their combinations.

        Raises:
            InvalidConfigError: names the field and its value.
            UnsupportedEstimatorError: an estimator of UNPLANNABLE_ESTIMATORS.
        """
        for name, least in _LEAST.items():
            require_at_least(getattr(self, name), least, field=name)
        if self.max_samples > LARGEST_GROUP:
            raise InvalidConfigError("max_samples", f"{self.max_samples} is above {LARGEST_GROUP}")
        for name, least_s in _LEAST_S.items():
            object.__setattr__(
                self, name, checked_seconds(getattr(self, name), least_s=least_s, field=name)
            )
        require_plannable(self.estimator)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise InvalidConfigError(
                    name, f"{getattr(self, name)!r} is not one of {', '.join(choices)}"
                )
        for name, value in checked_settings(self).items():
            object.__setattr__(self, name, value)
        self._check_combinations()
        self._check_micro_batches()
        self._check_overlong()
        self._check_age()
        declared = checked_declarations(self.extra_columns, merge=self.merge)
        object.__setattr__(self, "extra_columns", declared)
        self._check_deadlines()
        deadlock = find_deadlock(self)
        if deadlock is not None:
            raise InvalidConfigError(*deadlock)

    @property
    def chooses_by_event(self) -> bool:
        """Whether the groups of a batch depend on when it is planned: see BatchDue."""
        return self.max_age_policy != "keep" or self.selection != "ready_first"

    @property
    def budget(self) -> Budget:
        """Of a forward pass. Rows that are refused for their length are never planned."""
        return Budget(
            limit=self.max_tokens_per_micro_batch,
            model=self.micro_batch_cost,
            a=self.cost_per_token,
            b=self.cost_per_squared_token,
            alignment=self.alignment,
        )

    def _check_combinations(self) -> None:
        if self.batch_groups % self.mini_batch_groups:
            raise InvalidConfigError(
                "mini_batch_groups",
                f"{self.mini_batch_groups} does not divide batch_groups={self.batch_groups}",
            )
        if 0 < self.max_bytes < self.batch_groups * LEAST_GROUP_BYTES:
            raise InvalidConfigError(
                "max_bytes",
                f"{self.max_bytes} never holds the {self.batch_groups} groups of a step, each of "
                f"{LEAST_GROUP_BYTES} bytes at least",
            )
        if self.max_staleness == 0 and self.max_planned_ahead > 0:
            raise InvalidConfigError(
                "max_planned_ahead",
                f"{self.max_planned_ahead} plans from older weights, but max_staleness is 0",
            )
        if (self.aggregation == "constant") != (self.length_constant > 0):
            raise InvalidConfigError(
                "length_constant",
                f"{self.length_constant} does not go with aggregation={self.aggregation!r}",
            )
        why_not = _WEIGHTLESS.get(self.aggregation)
        if self.row_weights != "per_row" and why_not:
            self._refuse_row_weights(why_not)
        if self.row_weights == "rollout_mean" and self.aggregation != "seq_mean_token_mean":
            self._refuse_row_weights("a row's sum of tokens would count its length twice")

    def _check_deadlines(self) -> None:
        if (self.deadline_policy == "refill") != (self.max_refills > 0):
            raise InvalidConfigError(
                "max_refills",
                f"{self.max_refills} does not go with deadline_policy={self.deadline_policy!r}",
            )
        has_deadline = self.group_deadline_s > 0 or self.reward_deadline_s > 0
        if self.deadline_policy == "train_short" and not has_deadline:
            raise InvalidConfigError(
                "deadline_policy",
                "'train_short' needs a group_deadline_s or a reward_deadline_s above 0",
            )

    def _check_age(self) -> None:
        if self.max_age_policy == "keep":
            return
        if self.max_staleness == 0:
            raise InvalidConfigError(
                "max_age_policy",
                f"{self.max_age_policy!r} needs max_staleness >= 1: with 0 every group that began "
                "before the newest weights would expire; allow 1, or use 'keep'",
            )
        if self.max_planned_ahead > self.max_staleness:
            raise InvalidConfigError(
                "max_age_policy",
                f"{self.max_age_policy!r} with max_planned_ahead={self.max_planned_ahead} expires "
                "everything: the newest weights are so many steps old when a batch is planned, and "
                f"max_staleness={self.max_staleness}",
            )

    def _check_overlong(self) -> None:
        if self.overlong_buffer > self.overlong_length:
            raise InvalidConfigError(
                "overlong_buffer",
                f"{self.overlong_buffer} is more than overlong_length={self.overlong_length}",
            )
        if self.overlong_length and not (self.overlong_buffer or self.mask_truncated):
            raise InvalidConfigError(
                "overlong_length",
                f"{self.overlong_length} without overlong_buffer and mask_truncated does nothing",
            )
        if self.masked_reward != "keep" and not self.mask_truncated:
            raise InvalidConfigError(
                "masked_reward", f"{self.masked_reward!r} without mask_truncated does nothing"
            )

    def _check_micro_batches(self) -> None:
        for name, default in (("cost_per_token", 1.0), ("cost_per_squared_token", 0.0)):
            cost = checked_cost(getattr(self, name), field=name)
            object.__setattr__(self, name, cost)
            if self.micro_batch_cost != "quadratic" and cost != default:
                raise InvalidConfigError(
                    name, f"{cost} does not go with micro_batch_cost={self.micro_batch_cost!r}"
                )
        if self.over_long == "refuse" and self.max_tokens_per_micro_batch == 0:
            raise InvalidConfigError(
                "over_long", "'refuse' without max_tokens_per_micro_batch refuses nothing"
            )

    def _refuse_row_weights(self, why_not: str) -> None:
        raise InvalidConfigError(
            "row_weights",
            f"{self.row_weights!r} does not go with aggregation={self.aggregation!r}: {why_not}",
        )


_WEIGHTLESS: dict[str, str] = {
    "token_mean": "it counts tokens alike, whatever row they are in",
    "rollout_mean": "it divides by the trajectory's tokens already",
    "prompt_mean": "it divides by the group's tokens already",
}
"""Aggregations that divide by something other than the sum of weights, and why weights of rows
would only distort them."""

_LEAST = {
    "batch_groups": 1,
    "mini_batch_groups": 1,
    "length_constant": 0,
    "max_staleness": 0,
    "max_open_groups": 0,
    "max_samples": 1,
    "max_planned_ahead": 0,
    "pad_token_id": 0,
    "max_tokens_per_micro_batch": 0,
    "overlong_length": 0,
    "overlong_buffer": 0,
    "alignment": 1,
    "passes_multiple_of": 1,
    "rows_multiple_of": 1,
    "max_refills": 0,
    "retain_checkpoints": 1,
    "max_dead_bytes": 0,
    "max_bytes": 0,
}
_LEAST_S = {
    "lease_s": 0.3,
    "takeover_s": 0.0,
    "group_deadline_s": 0.0,
    "reward_deadline_s": 0.0,
}
