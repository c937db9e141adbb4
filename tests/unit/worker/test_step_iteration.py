"""Iteration over a step whose stream fails in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testkit.training import make_mini_batch
from turnstream.errors import NotReadyError
from turnstream.worker import PulledMiniBatch
from turnstream.worker.steps import Step

NUM_MINI_BATCHES = 3


class LateStream:
    """Yields the mini-batches after the first; each is late once."""

    def __init__(self) -> None:
        self._next = 1
        self._is_late = True

    def __iter__(self) -> Iterator[PulledMiniBatch]:
        return self

    def __next__(self) -> PulledMiniBatch:
        self._is_late = not self._is_late
        if not self._is_late:
            raise NotReadyError(f"mini-batch {self._next} did not come")
        self._next += 1
        return _mini_batch(self._next - 1)


def _mini_batch(index: int) -> PulledMiniBatch:
    return make_mini_batch(mini_batch=index, num_mini_batches=NUM_MINI_BATCHES)


@pytest.fixture
def step() -> Step:
    stream: Any = LateStream()
    return Step(stream, _mini_batch(0), waited_s=0.0)


def test_loop_over_a_step_resumes_where_data_was_late(step: Step) -> None:
    # A generator ended at the error, and the next loop had no mini-batch.
    seen: list[int] = []
    num_errors = 0
    while len(seen) < NUM_MINI_BATCHES:
        try:
            for mini_batch in step:
                seen += [mini_batch.info.mini_batch]
        except NotReadyError:
            num_errors += 1

    assert seen == [0, 1, 2]
    assert num_errors == 2
    assert list(step) == []


def test_epochs_resume_in_the_first_and_repeat_all_mini_batches(step: Step) -> None:
    mini_batches = step.mini_batches(epochs=2)
    seen: list[tuple[int, int]] = []
    num_errors = 0
    while len(seen) < 2 * NUM_MINI_BATCHES:
        try:
            for mini_batch in mini_batches:
                seen += [(mini_batch.epoch, mini_batch.info.mini_batch)]
        except NotReadyError:
            num_errors += 1

    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert num_errors == 2
