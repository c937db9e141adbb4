"""Statistics of tags and metrics as JSON values for people and their tools."""

from __future__ import annotations

from typing import Any

from turnstream.types import Figures, ValueStatistics


def shown_figures(figures: Figures) -> dict[str, Any]:
    """Return the statistics as JSON values, with means in place of sums."""
    return {
        "metrics": {
            name: {
                "num_trajectories": each.num_trajectories,
                "mean": each.mean,
                "minimum": each.minimum,
                "maximum": each.maximum,
            }
            for name, each in figures.metrics.items()
        },
        "tags": {
            name: {
                "values": {text: _shown_value(each) for text, each in tag.values.items()},
                "other": tag.other and _shown_value(tag.other),
            }
            for name, tag in figures.tags.items()
        },
        "num_left_out": figures.num_left_out,
    }


def _shown_value(value: ValueStatistics) -> dict[str, Any]:
    return {"num_trajectories": value.num_trajectories, "reward_mean": value.reward_mean}
