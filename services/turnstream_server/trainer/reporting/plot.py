"""The plot of a training: reward, loss, KL and tokens per second over the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from turnstream.optional import from_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WINDOW_SHARE: Final = 20
"""The mean runs over the steps divided by this number."""

_FEW_STEPS: Final = 40
"""Below it each step has a point."""


class Panel(NamedTuple):
    """One panel of the plot.

    Attributes:
        label: title of the vertical axis, with the unit.
        lines: (metric, words in the legend).
        form: format of the numbers at the vertical axis.
        starts_at_zero: whether the vertical axis begins at 0.
    """

    label: str
    lines: tuple[tuple[str, str], ...]
    form: str = "{x:g}"
    starts_at_zero: bool = False


PANELS: Final = (
    Panel("mean reward", (("reward_mean", ""),)),
    Panel("loss", (("loss", ""),)),
    Panel("KL(behaviour || current) (nats)", (("kl", ""),)),
    Panel(
        "tokens/s",
        (("tokens_per_s", "tokens of the rows"), ("trained_tokens_per_s", "tokens in the loss")),
        form="{x:,.0f}",
        starts_at_zero=True,
    ),
)


def plot_metrics(steps: Sequence[Mapping[str, Any]], out: Path, *, title: str) -> None:
    """Draw the metrics of some steps as a PNG image.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OSError: the image cannot be written.
    """
    draw(steps, title=title).savefig(out, format="png")


def draw(steps: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Return a figure with a panel for each of `PANELS`.

    A panel without values has a note. Thin lines are steps. From 40 steps on, a thicker line is a
    running mean.
    """
    with from_extra("plot", needed_by="turnstream plot", distribution="turnstream-server"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(10, 6.5), dpi=150, layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, parse_math=False)
    window = max(1, len(steps) // _WINDOW_SHARE)
    panels = figure.subplots(2, 2, sharex=True).flat
    for axes, panel in zip(panels, PANELS, strict=True):
        _draw_panel(axes, panel, steps, window=window)
    figure.align_ylabels()
    if window > 1:
        figure.supxlabel(f"thick lines: mean over {window} steps", fontsize=8, color="0.4")
    return figure


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over a window around each value; shorter at the ends, without NaN.

    >>> running_mean([1.0, 2.0, float("nan"), 6.0], 3)
    [1.5, 1.5, 4.0, 6.0]
    """
    known = np.isfinite(values)
    box = np.ones(window)
    sums = np.convolve(np.where(known, values, 0.0), box, mode="same")
    counts = np.convolve(known, box, mode="same")
    means = np.full(len(values), math.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means.tolist()


def _draw_panel(
    axes: Axes, panel: Panel, steps: Sequence[Mapping[str, Any]], *, window: int
) -> None:
    lines = {words: _values(steps, name) for name, words in panel.lines}
    known = {words: each for words, each in lines.items() if np.isfinite(each).any()}
    for words, values in known.items():
        _draw_line(axes, [each["step"] for each in steps], values, words=words, window=window)
    if not known:
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color="0.5")
    elif len(panel.lines) > 1:
        axes.legend(frameon=False, fontsize=8)
    if panel.starts_at_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(panel.label, fontsize=9)
    axes.locator_params("x", integer=True)
    axes.yaxis.set_major_formatter(panel.form)
    axes.tick_params(labelsize=8, labelbottom=True)
    axes.grid(visible=True, linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_line(
    axes: Axes, steps: Sequence[int], values: Sequence[float], *, words: str, window: int
) -> None:
    marker = "." if len(steps) < _FEW_STEPS else ""
    alpha = 0.4 if window > 1 else 1.0
    (thin,) = axes.plot(steps, values, linewidth=0.8, marker=marker, markersize=4, alpha=alpha)
    if window > 1:
        axes.plot(steps, running_mean(values, window), linewidth=1.4, color=thin.get_color())
    axes.plot([], [], color=thin.get_color(), label=words)  # the entry of the legend


def _values(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    found = [each.get(name) for each in steps]
    return [math.nan if value is None else float(value) for value in found]
