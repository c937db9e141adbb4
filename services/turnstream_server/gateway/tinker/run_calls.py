"""Training calls on the next mini-batch of a run: the rows are those of the run.

A client of the SDK sends one placeholder datum, and the name of the run as a setting of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from turnstream.batching.rows.operations import LOSS_SETTINGS
from turnstream.errors import BatchingError
from turnstream_server.operations.contents import ForwardBackwardRun

RUN: Final = "run"
"""Setting of the loss that names a run."""

_LOSSES: Final = ("ppo",)
_BOUNDS: Final = {"clip_low_threshold": (0.0, 1.0), "clip_high_threshold": (1.0, math.inf)}


def make_run_call(
    run: str, *, loss_fn: str, settings: Mapping[str, float | str]
) -> ForwardBackwardRun:
    """Return the content of a call on a run; BatchingError names a value that is not supported."""
    if not run:
        raise BatchingError("run is empty, expected the name of a run")
    if loss_fn not in _LOSSES:
        known = ", ".join(_LOSSES)
        raise BatchingError(f"loss_fn {loss_fn!r} is not supported on a run; known: {known}")
    checked = {name: _checked(name, value, loss_fn) for name, value in settings.items()}
    return ForwardBackwardRun(run, loss_fn, checked)


def require_placeholder(*lengths: int, run: str) -> None:
    """Raise BatchingError unless the datums of these lengths are one placeholder."""
    if lengths != (1,):
        sent = f"{len(lengths)} datums of {sum(lengths)} tokens"
        expected = "expected one datum of one token: the rows are those of the run"
        raise BatchingError(f"the call on run {run!r} has {sent}, {expected}")


def _checked(name: str, value: float | str, loss_fn: str) -> float:
    if name not in LOSS_SETTINGS[loss_fn]:
        known = ", ".join((RUN, *LOSS_SETTINGS[loss_fn]))
        raise BatchingError(f"loss_fn_config has {name!r}; {loss_fn} on a run has: {known}")
    low, high = _BOUNDS[name]
    if isinstance(value, str) or not low <= value <= high or math.isinf(value):
        bounds = f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} or more"
        raise BatchingError(f"loss_fn_config[{name!r}] is {value!r}, expected {bounds}")
    return float(value)
