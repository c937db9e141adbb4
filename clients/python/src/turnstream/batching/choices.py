"""Settings that are one of a few words, and the words of each."""

from __future__ import annotations

from typing import Literal

from turnstream.batching.microbatch import CostModel
from turnstream.batching.packing import OverLong

Estimator = Literal[
    "grpo",
    "grpo_population",
    "grpo_leave_one_out",
    "dr_grpo",
    "rloo",
    "maxrl",
    "opo",
    "gdpo",
    "gigpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
]
RewardSource = Literal["outcome", "sum_of_turns", "last_turn"]
SingletonAdvantage = Literal["zero", "raw"]
DeadlinePolicy = Literal["drop", "train_short", "refill"]
RefillFallback = Literal["drop", "train_short"]
Surplus = Literal["drop", "keep"]
Aggregation = Literal[
    "token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_mean",
    "constant",
    "rollout_mean",
    "prompt_mean",
]
RowWeights = Literal["per_row", "per_trajectory", "rollout_mean"]
MaskedReward = Literal["keep", "leave_out"]
MaxAgePolicy = Literal["drop", "mask", "keep"]
Selection = Literal["in_order", "oldest_weights", "ready_first"]

CHOICES: dict[str, tuple[str, ...]] = {
    "estimator": Estimator.__args__,
    "reward_source": RewardSource.__args__,
    "singleton_advantage": SingletonAdvantage.__args__,
    "aggregation": Aggregation.__args__,
    "deadline_policy": DeadlinePolicy.__args__,
    "refill_fallback": RefillFallback.__args__,
    "surplus": Surplus.__args__,
    "row_weights": RowWeights.__args__,
    "max_age_policy": MaxAgePolicy.__args__,
    "selection": Selection.__args__,
    "masked_reward": MaskedReward.__args__,
    "micro_batch_cost": CostModel.__args__,
    "over_long": OverLong.__args__,
}
"""Of each such field of BatchingConfig, the words that it may be."""
