"""Refusals have decoded names."""

from __future__ import annotations

import pytest

from testkit import ids
from testkit.stores import Store
from turnstream.errors import ConflictError, NotReadyError
from turnstream.generator import Publisher

pytestmark = pytest.mark.redis

GROUP, WRITER, OTHER = "maze 7/b#1", "host:7/gpu", "host:8/gpu"


def test_second_writer_gets_the_name_of_the_first(store: Store) -> None:
    run = store.new_run()

    with (
        Publisher(store.url, run, writer=WRITER) as first,
        Publisher(store.url, run, writer=OTHER) as second,
    ):
        first.trajectory(GROUP, 0, num_samples=2).append(ids("ab"), ids("c")).result(10)

        with pytest.raises(ConflictError, match=rf"^{GROUP}/0/0 is being written by {WRITER}$"):
            second.trajectory(GROUP, 0, num_samples=2).__enter__()
        with pytest.raises(ConflictError, match=rf"^{GROUP}/0/0 is being written by {WRITER}$"):
            second.adopt(GROUP, 0)
        with pytest.raises(ConflictError, match=rf"^group {GROUP} was opened with 2 samples"):
            second.trajectory(GROUP, 1, num_samples=3).__enter__()


def test_admission_wait_names_the_generator_of_the_open_groups(store: Store) -> None:
    run = store.new_run(batch_groups=1, max_staleness=0, max_planned_ahead=0)

    with (
        Publisher(store.url, run, writer=WRITER) as first,
        Publisher(store.url, run, writer=OTHER, admission_timeout_s=0.1) as second,
    ):
        first.trajectory(GROUP, 0, num_samples=1).__enter__()
        with pytest.raises(NotReadyError) as told:
            second.trajectory("other", 0, num_samples=1).__enter__()

    sentences = [reason.sentence for reason in told.value.reasons]
    held = f"group {GROUP} waits for sample 0 of generator {WRITER}"
    assert any(sentence.startswith(held) for sentence in sentences), sentences
