"""Refusals have decoded names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from testkit import ids, wait_until
from turnstream.errors import ConflictError, NotReadyError
from turnstream.generator import Publisher
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

NewRun = Callable[..., str]
GROUP, WRITER, OTHER = "maze 7/b#1", "host:7/gpu", "host:8/gpu"


def test_a_writer_that_comes_second_reads_who_writes_what(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(client)

    with (
        Publisher(server.url, run, writer=WRITER) as first,
        Publisher(server.url, run, writer=OTHER) as second,
    ):
        first.trajectory(GROUP, 0, num_samples=2).append(ids("ab"), ids("c")).result(10)

        with pytest.raises(ConflictError, match=rf"^{GROUP}/0/0 is being written by {WRITER}$"):
            second.trajectory(GROUP, 0, num_samples=2).__enter__()
        with pytest.raises(ConflictError, match=rf"^{GROUP}/0/0 is being written by {WRITER}$"):
            second.take_over(GROUP, 0)
        with pytest.raises(ConflictError, match=rf"^group {GROUP} was opened with 2 samples"):
            second.trajectory(GROUP, 1, num_samples=3).__enter__()


def test_lapsed_trajectory_names_its_writer(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(client, lease_s=0.3)
    with Publisher(server.url, run, writer=WRITER) as first:
        first.trajectory(GROUP, 0, num_samples=1).__enter__()

    with Publisher(server.url, run, writer=OTHER) as second:
        wait_until(lambda: len(second.lapsed()) == 1, describe="the end of a lease")
        (lapsed,) = second.lapsed()

    assert (lapsed.writer, lapsed.key.readable_name) == (WRITER, f"{GROUP}/0/0")


def test_a_wait_for_leave_names_the_generator_that_holds_the_groups(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(client, batch_groups=1, max_staleness=0, max_planned_ahead=0)

    with (
        Publisher(server.url, run, writer=WRITER) as first,
        Publisher(server.url, run, writer=OTHER, admission_timeout_s=0.1) as second,
    ):
        first.trajectory(GROUP, 0, num_samples=1).__enter__()
        with pytest.raises(NotReadyError) as told:
            second.trajectory("other", 0, num_samples=1).__enter__()

    sentences = [reason.sentence for reason in told.value.reasons]
    held = f"group {GROUP} waits for sample 0 of generator {WRITER}"
    assert any(sentence.startswith(held) for sentence in sentences), sentences
