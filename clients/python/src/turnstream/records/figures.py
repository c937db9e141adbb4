"""Tags and metrics that were summed up, as part of a manifest and as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from turnstream.types import Figures, MetricFigures, TagFigures, ValueFigures
from turnstream.wire.v1 import records_pb2 as wire

_OF_METRIC: Final = ("num_trajectories", "total", "minimum", "maximum")
_OF_VALUE: Final = ("num_trajectories", "num_rewarded", "reward_total")


def encode_figures(figures: Figures) -> wire.Figures | None:
    """The message; None where there is nothing to say, as in records of older releases."""
    if not figures:
        return None
    return wire.Figures(
        metrics=[
            wire.MetricFigures(
                name=name,
                num_trajectories=each.num_trajectories,
                total=each.total,
                minimum=each.minimum,
                maximum=each.maximum,
            )
            for name, each in figures.metrics.items()
        ],
        tags=[
            wire.TagFigures(
                name=name,
                values=[_encode_value(text, each) for text, each in tag.values.items()],
                other=None if tag.other is None else _encode_value("", tag.other),
            )
            for name, tag in figures.tags.items()
        ],
        num_left_out=figures.num_left_out,
    )


def decode_figures(message: wire.Figures) -> Figures:
    """What `encode_figures` was given."""
    return Figures(
        metrics={
            each.name: MetricFigures(
                num_trajectories=each.num_trajectories,
                total=each.total,
                minimum=each.minimum,
                maximum=each.maximum,
            )
            for each in message.metrics
        },
        tags={
            each.name: TagFigures(
                values={one.value: _decode_value(one) for one in each.values},
                other=_decode_value(each.other) if each.HasField("other") else None,
            )
            for each in message.tags
        },
        num_left_out=message.num_left_out,
    )


def plain_figures(figures: Figures) -> dict[str, Any]:
    """The same as values that JSON has; sums and not means, so that nothing is rounded."""
    return {
        "metrics": {
            name: {part: getattr(each, part) for part in _OF_METRIC}
            for name, each in figures.metrics.items()
        },
        "tags": {
            name: {
                "values": {text: _plain_value(each) for text, each in tag.values.items()},
                "other": None if tag.other is None else _plain_value(tag.other),
            }
            for name, tag in figures.tags.items()
        },
        "num_left_out": figures.num_left_out,
    }


def figures_of_plain(values: Mapping[str, Any]) -> Figures:
    """What `plain_figures` was given.

    Raises:
        KeyError, TypeError, AttributeError: the values are no figures.
    """
    return Figures(
        metrics={
            name: MetricFigures(**_numbers(each, _OF_METRIC))
            for name, each in values["metrics"].items()
        },
        tags={
            name: TagFigures(
                values={text: _value_of(each) for text, each in tag["values"].items()},
                other=None if tag["other"] is None else _value_of(tag["other"]),
            )
            for name, tag in values["tags"].items()
        },
        num_left_out=_numbers(values, ("num_left_out",))["num_left_out"],
    )


def shown_figures(figures: Figures) -> dict[str, Any]:
    """The same as JSON for people and their tools: means in place of sums."""
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
                "other": None if tag.other is None else _shown_value(tag.other),
            }
            for name, tag in figures.tags.items()
        },
        "num_left_out": figures.num_left_out,
    }


def _shown_value(figures: ValueFigures) -> dict[str, Any]:
    return {"num_trajectories": figures.num_trajectories, "reward_mean": figures.reward_mean}


def _encode_value(text: str, figures: ValueFigures) -> wire.ValueFigures:
    return wire.ValueFigures(
        value=text,
        num_trajectories=figures.num_trajectories,
        num_rewarded=figures.num_rewarded,
        reward_total=figures.reward_total,
    )


def _decode_value(message: wire.ValueFigures) -> ValueFigures:
    return ValueFigures(
        num_trajectories=message.num_trajectories,
        num_rewarded=message.num_rewarded,
        reward_total=message.reward_total,
    )


def _plain_value(figures: ValueFigures) -> dict[str, Any]:
    return {part: getattr(figures, part) for part in _OF_VALUE}


def _value_of(values: Mapping[str, Any]) -> ValueFigures:
    return ValueFigures(**_numbers(values, _OF_VALUE))


def _numbers(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The values of these names, each a number of the kind that its name says."""
    for name in names:
        value = cast("object", values[name])
        kinds = int if name.startswith("num_") else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}")
    return {name: values[name] for name in names}
