"""The configuration of a run: its settings, validated as a whole. Stored with the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_type_hints

from turnstream.batching.config.declarations import checked_declarations
from turnstream.batching.config.group_filter import GroupFilter, checked_filters
from turnstream.batching.config.rules import UNPLANNABLE_ESTIMATORS, config_problems
from turnstream.batching.config.values import (
    Aggregation,
    Cost,
    Count,
    DeadlinePolicy,
    Discount,
    ErrorTrajectories,
    Estimator,
    GroupSize,
    LeaseTime,
    LengthWeight,
    MaskedReward,
    MaxAgePolicy,
    NormalizeAdvantages,
    Positive,
    RefillFallback,
    RewardBound,
    RewardSource,
    RowWeights,
    Seconds,
    Selection,
    SingletonAdvantage,
    Surplus,
    TurnWeight,
    checked_value,
    checked_weights,
)
from turnstream.batching.packing.balance import Method as BalanceMethod
from turnstream.batching.packing.bins import Method as PackingMethod
from turnstream.batching.packing.bins import OverLong
from turnstream.batching.packing.microbatch import Budget, CostModel, PassOrder
from turnstream.errors import InvalidConfigError, UnsupportedEstimatorError
from turnstream.types import DeclaredColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """Settings of a run, valid one by one and together: how its groups become the rows of a step.

    Attributes:
        batch_groups: groups of one training step.
        mini_batch_groups: groups of one optimizer update; divides `batch_groups`.
        estimator: rule from rewards to advantages (turnstream.batching.scoring.advantages). With
            "remax", sample 0 of each group is sampled greedily; it is compared and not trained.
            With "gae", advantages are 0 in a batch: a trainer with a critic estimates them.
        pass_k: k of "pass_at_k", 2 or more.
        baseline_weight: metric of a trajectory that weighs its reward in the baseline of "opo";
            empty for its trained tokens, those included that its masks leave untrained.
        normalize_advantages: "batch" whitens the advantages of any estimator over the trained
            tokens of the batch: (x - mean) / sqrt(var + 1e-8).
        reward_source: origin of a trajectory's one reward. "outcome" is the reward of the seal; the
            other two read the token rewards of the turns.
        component_weights: (name, weight) of the reward components of "gdpo", sorted by name.
        singleton_advantage: advantage of a group's only trajectory: 0, or its raw reward. "gae",
            "remax" and "reinforce_pp" do not read it.
        turn_weight: factor of gigpo for the advantage of a turn among the group's turns that began
            in the same state. It is added to the trajectory's advantage.
        turn_discount: gamma of gigpo, the discount of later turns' rewards.
        divide_by_std: whether gigpo divides by the standard deviation, like grpo, or takes the
            difference to the mean, like dr_grpo.
        aggregation: the loss denominator the trainer uses.
        length_constant: tokens, the constant of `aggregation="constant"`; 0 otherwise.
        row_weights: weight in the loss of each row of a trajectory with several rows: 1, an equal
            share of 1, or its share of the trajectory's trained tokens.
        merge: merge turns that continue each other into one row; False makes one row per turn.
        overlong_length: sampled tokens of all turns, trained or not, above which a trajectory is
            too long; 0 means no limit.
        overlong_buffer: response tokens before `overlong_length` over which the compared reward
            falls by up to 1; 0 leaves it unchanged.
        length_reward_weight: factor of the length reward, which is added to the compared reward.
            The longest response of the compared members of a group has -1/2, the shortest 1/2. An
            incorrect one has at most 0 (arXiv:2501.12599). 0 means none.
        correct_reward: reward from which on a response is correct, before any penalty.
        mask_truncated: trajectories that were truncated or aborted, or are longer than
            `overlong_length`, are masked: in the batch with no token trained, outside every
            denominator.
        error_trajectories: rule for trajectories with status "error". "drop": they are no members
            of their group, as if they had no reward. "mask": they are masked. "keep": they are
            trained.
        masked_reward: whether the reward of a masked trajectory is compared with the others of its
            group. "keep" compares it. "leave_out" does not: a group needs two others to be trained,
            and it waits for `num_needed` others while more samples may come.
        group_filters: rules by which complete groups are filtered, not trained: objects with the
            fields of GroupFilter. The first rule that holds gives the reason.
        max_staleness: steps a group may lag behind the weights it trains; bounds admission.
        max_open_groups: limit of groups in flight, neither decided nor planned; bounds admission
            too. 0 means no limit.
        max_samples: samples that one group may have; no group has more than 4,096. A revision
            leaves open groups unchanged.
        max_age_policy: rule for tokens more than `max_staleness` steps older than the weights that
            they train, when their batch is planned. "keep" trains them, "mask" leaves them
            untrained, "drop" expires their group and admits another. Plans ahead of the trainer
            count for future weights: if most groups are as old as `max_planned_ahead`,
            `max_staleness` must be larger.
        selection: order in which a batch takes complete groups: by opening ("in_order"), by the
            oldest version of a trained token, or by completion.
        max_planned_ahead: batches planned beyond the next step. 0 if `max_staleness` is 0.
        pad_token_id: written into padding positions; never read by the loss.
        max_tokens_per_micro_batch: largest cost of one forward pass; 0 means no limit.
        micro_batch_cost: cost model of a pass. "padded": rows x longest row. "packed": the sum of
            the rows. "quadratic": a * L + b * L * L summed over their lengths L.
        cost_per_token: a of "quadratic".
        cost_per_squared_token: b of "quadratic"; a transformer of hidden size h has b / a = 1 / 6h.
        over_long: a row above the cost of a pass has a pass "alone", or its trajectory is not
            trained: "refuse".
        packing_method: method that fills the passes of a rank within their cost
            (turnstream.batching.packing.bins). Padded passes take rows from short to long.
        balance_method: method that makes the work of ranks, and then of the passes of a rank, equal
            (turnstream.batching.packing.balance). With "none", a rank takes consecutive rows, and
            passes stay as they are packed.
        pass_order: order of the passes of a rank: costliest first, cheap ones at both ends, or as
            they are packed.
        alignment: every row of a packed pass begins at a multiple of so many tokens, and its cost
            is rounded up to them. Tensor parallelism over t ranks needs a multiple of t, with
            context parallelism over c ranks of 2 * t * c.
        passes_multiple_of: every rank has a multiple of so many passes, for the stages of an
            interleaved pipeline. Inert rows fill the others.
        rows_multiple_of: the rows of a mini-batch on all ranks, inert ones included, are a multiple
            of this and of the number of ranks.
        extra_columns: columns that turns have in addition to tokens, sorted by name: objects with
            the fields of DeclaredColumn.
        lease_s: seconds of silence after which a writer loses its open trajectories, and any
            other may adopt them.
        takeover_s: seconds after that for an adoption; then they are abandoned.
        group_deadline_s: seconds from the opening of a group, or from its newest refill, after
            which `deadline_policy` decides it; 0 means never. Only the time with a leading batcher
            counts, on a monotonic clock.
        reward_deadline_s: seconds that a sealed trajectory waits for its reward, counted in the
            same way. After them the same policy decides without it; 0 means no limit.
        deadline_policy: rule for a group whose deadline has fired. "drop": it is incomplete.
            "train_short": it trains with the members it has, two or more. "refill": samples that
            ended or hang are retried. Samples that end without a valid member are retried without
            any deadline.
        max_refills: samples of one group that may be retried; above 0 only with "refill".
        refill_fallback: rule for a group without refills left.
        surplus: rule for members that are sealed after their group has all it needs. "keep": they
            join it until it is planned.
        retain_checkpoints: a session may start after any of the last so many committed steps; older
            steps are released.
        max_dead_bytes: limit for the payload of dead letters; above it the oldest are discarded.
        max_bytes: limit of reserved and stored bytes of trajectories until they are released, with
            4,096 more for each. Above it new groups wait, unless the trainer waits for them. 0
            means no limit but the memory of the server.

    Raises:
        InvalidConfigError: a value that its setting cannot have, or a rule that is broken.
        UnsupportedEstimatorError: an estimator that a plan cannot compute.
    """

    batch_groups: Positive
    mini_batch_groups: Positive
    estimator: Estimator = "grpo"
    reward_source: RewardSource = "outcome"
    component_weights: tuple[tuple[str, float], ...] = ()
    singleton_advantage: SingletonAdvantage = "zero"
    pass_k: GroupSize = 1
    baseline_weight: str = ""
    normalize_advantages: NormalizeAdvantages = "none"
    turn_weight: TurnWeight = 1.0
    turn_discount: Discount = 1.0
    divide_by_std: bool = True
    aggregation: Aggregation = "token_mean"
    length_constant: Count = 0
    row_weights: RowWeights = "per_row"
    merge: bool = True
    overlong_length: Count = 0
    overlong_buffer: Count = 0
    length_reward_weight: LengthWeight = 0.0
    correct_reward: RewardBound = 1.0
    mask_truncated: bool = False
    error_trajectories: ErrorTrajectories = "drop"
    masked_reward: MaskedReward = "keep"
    group_filters: tuple[GroupFilter, ...] = ()
    max_staleness: Count = 1
    max_open_groups: Count = 0
    max_samples: GroupSize = 1024
    max_age_policy: MaxAgePolicy = "keep"
    selection: Selection = "ready_first"
    max_planned_ahead: Count = 1
    pad_token_id: Count = 0
    max_tokens_per_micro_batch: Count = 0
    micro_batch_cost: CostModel = "padded"
    cost_per_token: Cost = 1.0
    cost_per_squared_token: Cost = 0.0
    over_long: OverLong = "alone"
    packing_method: PackingMethod = "best_fit_decreasing"
    balance_method: BalanceMethod = "auto"
    pass_order: PassOrder = "largest_first"  # noqa: S105 - of forward passes, no password
    alignment: Positive = 1
    passes_multiple_of: Positive = 1
    rows_multiple_of: Positive = 1
    extra_columns: tuple[DeclaredColumn, ...] = ()
    lease_s: LeaseTime = 60.0
    takeover_s: Seconds = 0.0
    group_deadline_s: Seconds = 0.0
    reward_deadline_s: Seconds = 0.0
    deadline_policy: DeadlinePolicy = "drop"
    max_refills: Count = 0
    refill_fallback: RefillFallback = "drop"
    surplus: Surplus = "drop"
    retain_checkpoints: Positive = 2
    max_dead_bytes: Count = 256 * 1024 * 1024
    max_bytes: Count = 0

    def __post_init__(self) -> None:
        """Check every field and their combinations."""
        if reason := UNPLANNABLE_ESTIMATORS.get(str(self.estimator)):
            raise UnsupportedEstimatorError(f"{self.estimator}: {reason}")
        stored = {
            name: checked_value(getattr(self, name), hint, field=name)
            for name, hint in _HINTS.items()
        }
        stored["component_weights"] = checked_weights(self.component_weights)
        stored["group_filters"] = checked_filters(self.group_filters)
        stored["extra_columns"] = checked_declarations(self.extra_columns, merge=self.merge)
        for name, value in stored.items():
            object.__setattr__(self, name, value)
        for field, message in config_problems(self):
            raise InvalidConfigError(field, message)

    @property
    def chooses_by_event(self) -> bool:
        """Whether the groups of a batch depend on when it is planned: see BatchDue."""
        return self.max_age_policy != "keep" or self.selection != "ready_first"

    @property
    def has_greedy_sample(self) -> bool:
        """Whether GREEDY_SAMPLE of each group is compared with the others and not trained."""
        return self.estimator == "remax"

    @property
    def budget(self) -> Budget:
        """Return the budget of a forward pass. Rows above it are never planned."""
        return Budget(
            limit=self.max_tokens_per_micro_batch,
            model=self.micro_batch_cost,
            a=self.cost_per_token,
            b=self.cost_per_squared_token,
            alignment=self.alignment,
            packing=self.packing_method,
            balancing=self.balance_method,
            order=self.pass_order,
        )


_HINTS = get_type_hints(BatchingConfig, include_extras=True)
