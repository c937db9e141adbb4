"""The interface of a receiver of metrics, and several receivers as one."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

from turnstream_server.trainer.reporting.declarations import undeclared

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives the metrics of each step.

    After a restart, the steps after the checkpoint come again. A sink shows their later values.
    """

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step; numbers are finite."""
        ...

    def close(self) -> None:
        """Write what is pending, and release files and ports."""
        ...


class Sinks:
    """Several sinks as one, which never raises: training continues without a sink that fails.

    The first failure of each sink is logged. The sink is tried again at the next step.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._failed: set[int] = set()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step in every sink; numbers that are not finite become null.

        A metric that is not declared is a warning.
        """
        if names := undeclared(metrics):
            warnings.warn(f"metrics that are not declared: {', '.join(names)}", stacklevel=2)
        finite = {name: _finite(value) for name, value in metrics.items()}
        self._call_each(lambda sink: sink.write(step, finite))

    def close(self) -> None:
        """Close every sink."""
        self._call_each(lambda sink: sink.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call_each(self, call: Callable[[Sink], None]) -> None:
        for number, sink in enumerate(self._sinks):
            try:
                call(sink)
            except Exception:  # training is worth more than its metrics
                if number not in self._failed:
                    self._failed.add(number)
                    logger.exception("%s fails; training continues", type(sink).__name__)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
