"""Sums of tags and metrics, as part of a manifest and as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from turnstream.types import Figures, MetricStatistics, TagStatistics, ValueStatistics
from turnstream.wire.v1 import records_pb2 as wire

_OF_METRIC: Final = ("num_trajectories", "total", "minimum", "maximum")
_OF_VALUE: Final = ("num_trajectories", "num_rewarded", "reward_total")


def encode_figures(figures: Figures) -> wire.Figures | None:
    """Return the message; None for empty ones, as in records of older releases."""
    if not figures:
        return None
    return wire.Figures(
        metrics=[
            wire.MetricFigures(name=name, **_parts(each, _OF_METRIC))
            for name, each in figures.metrics.items()
        ],
        tags=[
            wire.TagFigures(
                name=name,
                values=[
                    wire.ValueFigures(value=text, **_parts(each, _OF_VALUE))
                    for text, each in tag.values.items()
                ],
                other=tag.other and wire.ValueFigures(**_parts(tag.other, _OF_VALUE)),
            )
            for name, tag in figures.tags.items()
        ],
        num_left_out=figures.num_left_out,
    )


def decode_figures(message: wire.Figures) -> Figures:
    """Return the statistics of a message."""
    return Figures(
        metrics={
            each.name: MetricStatistics(**_parts(each, _OF_METRIC)) for each in message.metrics
        },
        tags={
            each.name: TagStatistics(
                values={
                    one.value: ValueStatistics(**_parts(one, _OF_VALUE)) for one in each.values
                },
                other=ValueStatistics(**_parts(each.other, _OF_VALUE))
                if each.HasField("other")
                else None,
            )
            for each in message.tags
        },
        num_left_out=message.num_left_out,
    )


def plain_figures(figures: Figures) -> dict[str, Any]:
    """Return the statistics as JSON values: sums and not means, so that nothing is rounded."""
    return _as_json(figures, of_metric=_OF_METRIC, of_value=_OF_VALUE)


def shown_figures(figures: Figures) -> dict[str, Any]:
    """Return the statistics as JSON values for people and their tools: means in place of sums."""
    return _as_json(
        figures,
        of_metric=("num_trajectories", "mean", "minimum", "maximum"),
        of_value=("num_trajectories", "reward_mean"),
    )


def figures_of_plain(values: Mapping[str, Any]) -> Figures:
    """Return the statistics of `plain_figures`.

    Raises:
        KeyError, TypeError, AttributeError: the values are no statistics.
    """
    return Figures(
        metrics={
            name: MetricStatistics(**_numbers(each, _OF_METRIC))
            for name, each in values["metrics"].items()
        },
        tags={
            name: TagStatistics(
                values={
                    text: ValueStatistics(**_numbers(each, _OF_VALUE))
                    for text, each in tag["values"].items()
                },
                other=None
                if tag["other"] is None
                else ValueStatistics(**_numbers(tag["other"], _OF_VALUE)),
            )
            for name, tag in values["tags"].items()
        },
        **_numbers(values, ("num_left_out",)),
    )


def _as_json(
    figures: Figures, *, of_metric: tuple[str, ...], of_value: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "metrics": {name: _parts(each, of_metric) for name, each in figures.metrics.items()},
        "tags": {
            name: {
                "values": {text: _parts(each, of_value) for text, each in tag.values.items()},
                "other": tag.other and _parts(tag.other, of_value),
            }
            for name, tag in figures.tags.items()
        },
        "num_left_out": figures.num_left_out,
    }


def _parts(value: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _numbers(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of these names; names with `num_` need integers."""
    for name in names:
        value = cast("object", values[name])
        kinds = int if name.startswith("num_") else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}")
    return {name: values[name] for name in names}
