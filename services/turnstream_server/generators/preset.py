"""Settings with which a small transformer learns the guessing game in a few seconds of CPU time.

Measured in one process with four seeds: ten steps have a mean reward of 0.82 after 82 to 122 steps
of 512 games, and rewards level off at 0.84 to 0.91. Demos with 256 games a step levelled off at
0.80 to 0.87. A random policy finds the secret in a fifth of the games, the best one always.
"""

from __future__ import annotations

from typing import Final

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.values import Estimator
from turnstream_server.generators.guessing import MAX_TOKENS, PAD, VOCAB_SIZE
from turnstream_server.models.spec import SmallModelSpec

LEARNING_RATE: Final = 2e-3

LORA_LEARNING_RATE: Final = 3e-3
"""With an adapter on all kinds of layers."""

ENTROPY_BONUS: Final = 0.02
"""Without it, most policies stop exploring before they find every number."""


def preset_config(*, estimator: Estimator = "dr_grpo") -> BatchingConfig:
    """Return the settings of the run.

    Learning slows down with staleness: 2 steps take a fifth more games than 1. Rewards are not
    divided by their deviation, which enlarges rare failures of a good policy.
    """
    return BatchingConfig(
        batch_groups=64,
        mini_batch_groups=32,
        estimator=estimator,
        max_staleness=1,
        pad_token_id=PAD,
    )


def preset_policy(*, seed: int) -> SmallModelSpec:
    """Return the first weights: two layers, 85,000 parameters."""
    return SmallModelSpec(vocab_size=VOCAB_SIZE, max_positions=MAX_TOKENS, seed=seed)


def preset_rates(*, lora_rank: int) -> dict[str, float]:
    """Return the fields of a trainer that the preset fills where they are open."""
    rate = LORA_LEARNING_RATE if lora_rank else LEARNING_RATE
    return {"learning_rate": rate, "entropy_bonus": ENTROPY_BONUS}
