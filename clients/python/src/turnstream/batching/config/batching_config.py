"""The configuration of a run: its settings, validated as a whole. Stored with the run."""

from __future__ import annotations

from dataclasses import dataclass

from turnstream.batching.config.declarations import checked_declarations
from turnstream.batching.config.rules import (
    MAX_TURN_WEIGHT,
    UNPLANNABLE_ESTIMATORS,
    config_problems,
)
from turnstream.batching.config.settings import Settings
from turnstream.batching.config.values import (
    CHOICES,
    checked_factor,
    checked_seconds,
    checked_weights,
    require_at_least,
)
from turnstream.errors import InvalidConfigError, UnsupportedEstimatorError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig(Settings):
    """Settings of a run that are valid, one by one and together.

    The attributes are those of `turnstream.batching.config.settings.Settings`.

    Raises:
        InvalidConfigError: a value that its setting cannot have, or a rule that is broken.
        UnsupportedEstimatorError: an estimator that a plan cannot compute.
    """

    def __post_init__(self) -> None:
        """Check every field and their combinations."""
        for name, least in _LEAST.items():
            require_at_least(getattr(self, name), least, field=name)
        stored: dict[str, object] = {
            name: checked_seconds(getattr(self, name), least_s=least_s, field=name)
            for name, least_s in _LEAST_S.items()
        }
        if self.estimator in UNPLANNABLE_ESTIMATORS:
            raise UnsupportedEstimatorError(
                f"{self.estimator}: {UNPLANNABLE_ESTIMATORS[self.estimator]}"
            )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise InvalidConfigError(
                    name, f"{getattr(self, name)!r} is not one of {', '.join(choices)}"
                )
        for name, most in _MOST.items():
            stored[name] = checked_factor(getattr(self, name), most=most, field=name)
        stored["component_weights"] = checked_weights(self.component_weights)
        stored["extra_columns"] = checked_declarations(self.extra_columns, merge=self.merge)
        for name, value in stored.items():
            object.__setattr__(self, name, value)
        for field, message in config_problems(self):
            raise InvalidConfigError(field, message)


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
_MOST = {
    "turn_weight": MAX_TURN_WEIGHT,
    "turn_discount": 1.0,
    "cost_per_token": 1e12,
    "cost_per_squared_token": 1e12,
}
