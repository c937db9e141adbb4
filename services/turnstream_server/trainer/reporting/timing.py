"""The wall and CPU seconds of a step, by part, and the rates that follow from them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

PARTS: Final = ("wait", "forward_backward", "optimizer", "publish", "checkpoint")
"""The measured parts of a step, in the order of `metrics.jsonl`."""


class StepClock:
    """Measures steps: one ends, and the next begins, with each call of `lap`.

    Args:
        wall: returns seconds; any origin.
        cpu: returns CPU seconds of the process.
    """

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._wall, self._cpu = wall, cpu
        self._created_s = wall()
        self.restart()

    def restart(self) -> None:
        """Begin a step now; drop the time since the last one."""
        self._began_s, self._began_cpu_s = self._wall(), self._cpu()
        self._parts_s: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part of the step."""
        began_s = self._wall()
        try:
            yield
        finally:
            self.add(part, self._wall() - began_s)

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to a part of the step; KeyError for one that is not in `PARTS`."""
        self._parts_s[part] += seconds

    def move(self, seconds: float, *, source: str, target: str) -> None:
        """Move seconds from one part of the step to another, which was measured inside it."""
        self.add(source, -seconds)
        self.add(target, seconds)

    def lap(self) -> dict[str, float]:
        """Return the times of the step by metric, and begin the next step.

        The measured parts and `other_s` sum to `step_s`.
        """
        now_s = self._wall()
        times = {
            **breakdown(now_s - self._began_s, self._parts_s),
            "cpu_s": self._cpu() - self._began_cpu_s,
            "elapsed_s": now_s - self._created_s,
        }
        self.restart()
        return times


def breakdown(step_s: float, parts_s: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of a step by metric, with the rest of its wall time as `other_s`.

    >>> breakdown(8.0, {"wait": 1.0, "publish": 4.0})
    {'step_s': 8.0, 'wait_s': 1.0, 'publish_s': 4.0, 'other_s': 3.0}
    """
    parts = {f"{part}_s": seconds for part, seconds in parts_s.items()}
    return {"step_s": step_s, **parts, "other_s": step_s - sum(parts_s.values())}


def rates(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the tokens per second of a step; 0 where a time is 0.

    Args:
        metrics: `num_tokens`, `num_trained_tokens`, `step_s` and `cpu_s` of the step.

    >>> rates({"num_tokens": 600, "num_trained_tokens": 200, "step_s": 2.0, "cpu_s": 4.0})
    {'trained_tokens_per_s': 100.0, 'tokens_per_s': 300.0, 'trained_tokens_per_cpu_s': 50.0}
    """
    trained, step_s = metrics["num_trained_tokens"], metrics["step_s"]
    return {
        "trained_tokens_per_s": _ratio(trained, step_s),
        "tokens_per_s": _ratio(metrics["num_tokens"], step_s),
        "trained_tokens_per_cpu_s": _ratio(trained, metrics["cpu_s"]),
    }


def _ratio(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
