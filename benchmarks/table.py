"""One line per job of the batching core: its CPU time beside that of its baselines."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: milliseconds of CPU time, and bytes written."""

    job: str
    loop_ms: float
    ours_ms: float
    copy_ms: float
    warm_copy_ms: float
    limit_ms: float
    num_bytes: int
    goal: float | None

    @property
    def gain(self) -> float:
        """Times faster than the loop."""
        return self.loop_ms / self.ours_ms

    @property
    def over_copy(self) -> float:
        """Times the plain copy into new memory."""
        return self.ours_ms / self.copy_ms

    @property
    def over_limit(self) -> float:
        """Times what numpy alone costs."""
        return self.ours_ms / self.limit_ms

    @property
    def limit_over_copy(self) -> float:
        """Times the plain copy into new memory that numpy alone costs: no job here gets below."""
        return self.limit_ms / self.copy_ms


def least_ms(job: Callable[[], Any], *, rounds: int) -> float:
    """Return the CPU milliseconds of the fastest round; each round's results are freed after it."""
    best = float("inf")
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        start = time.process_time()
        made = job()
        best = min(best, time.process_time() - start)
        del made
    gc.enable()
    return best * 1e3


def bytes_of(made: Any) -> int:
    """Bytes of all arrays in a value, those that share memory with nothing else of it."""
    return sum({id(array): array.nbytes for array in _arrays(made)}.values())


def _arrays(made: Any) -> Iterable[NDArray[Any]]:
    if isinstance(made, np.ndarray):
        yield made
    elif is_dataclass(made):
        for column in fields(made):
            yield from _arrays(getattr(made, column.name))
    elif isinstance(made, list | tuple) and made and not isinstance(made[0], str | int | float):
        for part in made:
            yield from _arrays(part)


class Table:
    """Measures jobs and prints a line for each."""

    def __init__(self, *, rounds: int) -> None:
        self.lines: list[Line] = []
        self._rounds = rounds
        print(
            f"{'job':50} {'loop ms':>8} {'ours ms':>8} {'gain':>6} {'new ms':>7} {'x new':>6} "
            f"{'warm ms':>7} {'limit ms':>8} {'x limit':>7}"
        )

    def add(
        self,
        job: str,
        ours: Callable[[], Any],
        *,
        loop_ms: float,
        goal: float | None = None,
        limit: Callable[[], Any] | None = None,
    ) -> None:
        """Measure a job whose loop took `loop_ms` (nan where there is none)."""
        num_bytes = bytes_of(ours())
        source: NDArray[np.uint8] = np.ones(num_bytes, np.uint8)

        def copy() -> NDArray[np.uint8]:
            into: NDArray[np.uint8] = np.empty(num_bytes, np.uint8)
            np.copyto(into, source)
            return into

        warm = copy()
        line = Line(
            job=job,
            loop_ms=loop_ms,
            ours_ms=least_ms(ours, rounds=self._rounds),
            copy_ms=least_ms(copy, rounds=self._rounds),
            warm_copy_ms=least_ms(lambda: np.copyto(warm, source), rounds=self._rounds),
            limit_ms=float("nan") if limit is None else least_ms(limit, rounds=self._rounds),
            num_bytes=num_bytes,
            goal=goal,
        )
        self.lines.append(line)
        print(
            f"{job:50} {_number(loop_ms, 8)} {_number(line.ours_ms, 8, 2)} "
            f"{_number(line.gain, 5)}x {_number(line.copy_ms, 7, 2)} {_number(line.over_copy, 5)}x "
            f"{_number(line.warm_copy_ms, 7, 2)} {_number(line.limit_ms, 8, 2)} "
            f"{_number(line.over_limit, 6)}x",
            flush=True,
        )


def _number(value: float, width: int, digits: int = 1) -> str:
    return f"{'-':>{width}}" if value != value else f"{value:{width}.{digits}f}"
