"""A healthy run that is trained all the time in the store under test."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Self

from fuzz.runs import CONFIG, KnownRun, publish
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream.worker import BatchStream

_GROUPS_PER_WRITE = 4
_PATIENCE_S = 120.0


class HealthyRun:
    """A generator and a trainer of one run in threads; a context manager.

    Attributes:
        steps_s: time of each step, in seconds of the monotonic clock.
        error: the error that ended a thread, or None.
    """

    def __init__(self, url: str, target: str, name: str) -> None:
        self.steps_s: list[float] = []
        self.error: BaseException | None = None
        self._url = url
        self._target = target
        self._name = name
        self._stops = threading.Event()
        self._threads = [
            threading.Thread(target=self._watched, args=(work,), name=f"healthy-{number}")
            for number, work in enumerate((self._generate, self._train))
        ]

    def __enter__(self) -> Self:
        with connect(self._url) as client:
            create_run(client, self._name, CONFIG)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stops.set()
        for thread in self._threads:
            thread.join()

    def longest_gap_s(self, start_s: float, stop_s: float) -> float:
        """Return the longest time between two steps."""
        between = [at_s for at_s in list(self.steps_s) if start_s <= at_s < stop_s]
        times = [start_s, *between, stop_s]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def _watched(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.error = error
            raise

    def _generate(self) -> None:
        rng, number = random.Random(self._name), 0
        run = KnownRun(name=self._name, rows={})
        while not self._stops.is_set():
            group_ids = [f"h{number + i}" for i in range(_GROUPS_PER_WRITE)]
            publish(self._url, run, group_ids, rng)
            number += _GROUPS_PER_WRITE
            while number - len(self.steps_s) > 20 and not self._stops.wait(0.01):
                pass

    def _train(self) -> None:
        with BatchStream(self._target, self._name, timeout_s=_PATIENCE_S) as stream:
            for mini_batch in stream:
                if mini_batch.is_last:
                    stream.committed(stream.stepped())
                    self.steps_s.append(time.monotonic())
                if self._stops.is_set():
                    return
