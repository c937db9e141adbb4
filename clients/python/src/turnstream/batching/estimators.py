"""Which settings of a run go with which advantage estimator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnstream.batching.config_values import checked_factor, checked_weights
from turnstream.errors import InvalidConfigError, UnsupportedEstimatorError

if TYPE_CHECKING:
    from turnstream.batching.config import BatchingConfig

UNPLANNABLE_ESTIMATORS = {
    "gae": "it needs a critic's value of every token, which no plan has: run with another "
    "estimator, and in the worker put what turnstream.batching.token_advantages.gae gives for "
    "MiniBatch.rows into Rows.advantages before the rows are laid out"
}
"""Estimators that the plan of a batch, which reads no token, cannot compute; and what can."""

MAX_TURN_WEIGHT = 1000.0
"""Times `MAX_REWARD` and the turns of a trajectory, it stays within float32."""

_NO_PENALTY: dict[str, str] = {
    "gdpo": "it compares components one by one; give the penalty as one of them",
    "maxrl": "it divides by the mean reward, and a penalty makes rewards negative",
}
"""Estimators whose rewards cannot take the penalty of long responses, and why."""

_OF_GIGPO = {"turn_weight": 1.0, "turn_discount": 1.0, "divide_by_std": True}
"""Settings that only gigpo reads, as they are where it does not."""


def require_plannable(estimator: str) -> None:
    """Refuse an estimator that is computed elsewhere.

    Raises:
        UnsupportedEstimatorError: says what it needs and where.
    """
    if estimator in UNPLANNABLE_ESTIMATORS:
        raise UnsupportedEstimatorError(f"{estimator}: {UNPLANNABLE_ESTIMATORS[estimator]}")


def checked_settings(config: BatchingConfig) -> dict[str, object]:
    """What is set for the estimator, by name, in the one form that is stored.

    Raises:
        InvalidConfigError: names the field and its value.
    """
    weights = checked_weights(config.component_weights)
    if (config.estimator == "gdpo") != (len(weights) >= 2) or len(weights) == 1:
        raise InvalidConfigError(
            "component_weights",
            f"{len(weights)} do not go with estimator={config.estimator!r}: "
            "gdpo takes two or more, the others none",
        )
    if config.estimator == "reinforce_pp" and config.reward_source != "outcome":
        raise InvalidConfigError(
            "reward_source",
            f"{config.reward_source!r} does not go with estimator='reinforce_pp': with rewards "
            "inside a trajectory its tokens have different returns, and a plan reads no token",
        )
    if config.overlong_buffer and config.estimator in _NO_PENALTY:
        raise InvalidConfigError(
            "overlong_buffer",
            f"{config.overlong_buffer} does not go with estimator={config.estimator!r}: "
            f"{_NO_PENALTY[config.estimator]}",
        )
    return {"component_weights": weights, **_checked_of_gigpo(config)}


def _checked_of_gigpo(config: BatchingConfig) -> dict[str, object]:
    checked: dict[str, object] = {
        "turn_weight": checked_factor(
            config.turn_weight, most=MAX_TURN_WEIGHT, field="turn_weight"
        ),
        "turn_discount": checked_factor(config.turn_discount, most=1.0, field="turn_discount"),
        "divide_by_std": config.divide_by_std,
    }
    for name, unread in _OF_GIGPO.items():
        if config.estimator != "gigpo" and checked[name] != unread:
            raise InvalidConfigError(
                name,
                f"{checked[name]} does not go with estimator={config.estimator!r}: "
                "only gigpo reads it",
            )
    return checked
