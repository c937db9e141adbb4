"""Settings of a run that look harmless one by one, and with which no batch would ever come."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from turnstream.batching.config import BatchingConfig

_SHORTEST_ROW = 2
"""Tokens: a prompt has one at least, and so has a response that is trained."""


class Deadlock(NamedTuple):
    """A setting that must change, and what it does."""

    field: str
    message: str


def find_deadlock(config: BatchingConfig) -> Deadlock | None:
    """Why a run of this config could never train; None where it can.

    What is refused elsewhere in BatchingConfig, one setting by itself, is not looked at again.
    """
    return _of_open_groups(config) or _of_row_costs(config) or _of_weights(config)


def _of_open_groups(config: BatchingConfig) -> Deadlock | None:
    """Groups that stay open until they are planned, and fewer of them than a batch has."""
    if config.surplus == "keep" and 0 < config.max_open_groups < config.batch_groups:
        return Deadlock(
            "max_open_groups",
            f"{config.max_open_groups} with surplus='keep' never fills a batch of "
            f"batch_groups={config.batch_groups}: complete groups stay open until they are planned",
        )
    return None


def _of_row_costs(config: BatchingConfig) -> Deadlock | None:
    """A forward pass that is too small for any row, where such rows are refused."""
    cost, limit = config.budget.cost([_SHORTEST_ROW]), config.max_tokens_per_micro_batch
    if config.over_long == "refuse" and cost > limit:
        return Deadlock(
            "max_tokens_per_micro_batch",
            f"{limit} with over_long='refuse' refuses every trajectory: the shortest row, of "
            f"{_SHORTEST_ROW} tokens, costs {cost:g}",
        )
    return None


def _of_weights(config: BatchingConfig) -> Deadlock | None:
    """Components that all count for nothing: every advantage is 0."""
    weights = config.component_weights
    if weights and not any(weight for _, weight in weights):
        return Deadlock("component_weights", f"{weights!r} are all 0, and so is every advantage")
    return None
