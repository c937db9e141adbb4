"""A group id that was used before: a restarted generator iterates over its prompts again."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import subprocess
import sys

import pytest

from testkit import ids
from testkit.services.stores import Store
from turnstream.errors import ConflictError, RejectedError
from turnstream.generator import GroupWriter, Publisher
from turnstream.generator.api.trajectory_writers import TrajectoryWriter
from turnstream.generator.api.work import Reopened
from turnstream.store.client import keys
from turnstream.store.run.groups import most_attempts
from turnstream.types import GroupOpened, TrajectoryKey

pytestmark = pytest.mark.redis

SEALED = {"g/0/0": "sealed", "g/1/0": "sealed", "g/2/0": "sealed"}

GENERATOR = """
import sys, time
from turnstream.generator import Publisher
from testkit import ids
publisher = Publisher(sys.argv[1], sys.argv[2], writer=sys.argv[3] or None)
group = publisher.group("g", 3).__enter__()
first, second = group.trajectory(0), group.trajectory(1)
first.append(ids("ab"), ids("c"))
first.seal(1.0)
if sys.argv[4] == "half":
    second.append(ids("ab"), ids("d")).result(10)
print("open", flush=True)
time.sleep(600)
"""


def killed_generator(url: str, run: str, *, writer: str = "", half: str = "") -> None:
    """Seal sample 0 of a group of 3, begin sample 1 where `half` is set, and die."""
    command = [sys.executable, "-c", GENERATOR, url, run, writer, half]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        process.send_signal(signal.SIGKILL)


def write_all(group: GroupWriter) -> list[int]:
    """Seal every sample that the group yields; return their numbers."""
    written: list[int] = []
    for trajectory in group:
        trajectory.append(ids("ab"), ids("c"))
        trajectory.seal(1.0)
        written.append(trajectory.key.sample)
    return written


def write_rest(publisher: Publisher) -> list[int]:
    with publisher.group("g", 3, exist_ok=True) as group:
        return write_all(group)


def test_finished_group_yields_no_sample_until_and_after_its_release(store: Store) -> None:
    run = store.new_run()
    with Publisher(store.url, run) as publisher:
        first = write_rest(publisher)
        again = write_rest(publisher)
        with (
            publisher.group("g", 3, exist_ok=True) as group,
            pytest.raises(RejectedError, match="sample 1 of group 'g' is finished"),
        ):
            group.trajectory(1)
        with (
            pytest.raises(ConflictError, match="was opened with 3 samples, not 4"),
            publisher.group("g", 4, exist_ok=True),
        ):
            pass
    counts = store.read(run).counts()
    # The ledger no longer names its trajectories; only a fingerprint of the group is left.
    names, digest = keys.run_keys(run), hashlib.sha1(b"g")
    store.client.delete(names.groups, names.ledger)
    store.client.hset(names.finished_groups, digest.hexdigest()[:3], digest.digest()[:8])
    with Publisher(store.url, run) as publisher:
        later = write_rest(publisher)

    assert (first, again, later) == ([0, 1, 2], [], [])
    assert counts == {"accepted": 3, "sealed": 3}


def test_restarted_generator_writes_only_the_unfinished_samples(store: Store) -> None:
    run = store.new_run(lease_s=1.0, takeover_s=60.0)
    killed_generator(store.url, run)

    with Publisher(store.url, run) as publisher:
        written = write_rest(publisher)

    assert written == [1, 2]
    assert store.read(run).states() == SEALED


@pytest.mark.parametrize("again", ["", "half", "sealed"])
def test_half_written_sample_starts_again_with_the_next_attempt(
    store: Store, caplog: pytest.LogCaptureFixture, again: str
) -> None:
    run = store.new_run()
    killed_generator(store.url, run, writer="gen-0", half="half")
    if again:  # the second process ends without leaving the group
        with Publisher(store.url, run, writer="gen-0") as publisher:
            first, _ = publisher.group("g", 3, exist_ok=True).__enter__()
            first.append(ids("ab"), ids("d"))
            if again == "sealed":
                first.seal(1.0)

    with Publisher(store.url, run, writer="gen-0") as publisher:
        written = write_rest(publisher)

    half = "abandoned:left half-written by an earlier process"
    ledger = store.read(run).ledger()
    assert written == ([2] if again == "sealed" else [1, 2])
    assert [ledger["g/1/0"], ledger["g/1/1"]] == [half, half if again == "half" else "sealed:1"]
    assert [name for name, state in store.read(run).states().items() if state == "sealed"] == [
        *("g/0/0", "g/2/0", "g/1/2" if again == "half" else "g/1/1")
    ]
    assert "group g: sample 1 starts again" in caplog.text


def test_half_written_sample_without_a_further_attempt_leaves_the_others(store: Store) -> None:
    run, group_id, num_samples = store.new_run(), "g" * 512, 513
    opened = GroupOpened(group_id=group_id, prompt_uid="", num_samples=num_samples)
    assert most_attempts(opened) == 1
    with Publisher(store.url, run, writer="gen-0") as publisher:  # ends without leaving the group
        first, *_ = publisher.group(group_id, num_samples).__enter__()
        first.append(ids("ab"), ids("d"))

    with (
        Publisher(store.url, run, writer="gen-0") as publisher,
        publisher.group(group_id, num_samples, exist_ok=True) as group,
    ):
        unfinished = [trajectory.key for trajectory in group]

    assert unfinished == [TrajectoryKey(group_id, sample) for sample in range(1, num_samples)]


def test_samples_of_a_living_generator_stay_with_it(store: Store) -> None:
    run = store.new_run(lease_s=1.0)
    with Publisher(store.url, run) as owner, owner.group("g", 3) as group:
        with Publisher(store.url, run) as publisher:
            written = write_rest(publisher)

        write_all(group)

    assert written == []
    assert store.read(run).states() == SEALED


def test_group_open_in_the_same_publisher_is_not_written_twice(store: Store) -> None:
    run = store.new_run()

    with Publisher(store.url, run) as publisher, publisher.group("g", 3) as group:
        inner = write_rest(publisher)
        write_all(group)

    assert inner == []


@pytest.mark.parametrize("num_lost", [1, 3])
def test_samples_that_another_generator_opens_first_are_its_own(
    store: Store, num_lost: int
) -> None:
    run = store.new_run()

    with Publisher(store.url, run) as publisher, Publisher(store.url, run) as faster:
        group = publisher.group("g", 3, exist_ok=True)
        reopen = group._reopen
        assert reopen is not None

        async def read_and_lose(opened: GroupOpened) -> Reopened[TrajectoryWriter]:
            found = await reopen(opened)
            if found.unopened:
                await asyncio.to_thread(write_first, faster)
            return found

        def write_first(publisher: Publisher) -> None:
            for sample in range(num_lost):
                with publisher.trajectory("g", sample, num_samples=3) as trajectory:
                    trajectory.append(ids("ab"), ids("c"))
                    trajectory.seal(1.0)

        group._reopen = read_and_lose
        with group:
            written = write_all(group)

    assert written == [*range(num_lost, 3)]
    assert store.read(run).states() == SEALED


def test_group_left_without_a_seal_is_named_in_one_warning(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    run = store.new_run()

    with Publisher(store.url, run) as publisher, publisher.group("task-7", 11) as group:
        first, second, *_ = group
        first.append(ids("ab"), ids("c"))
        first.seal(1.0)
        second.append(ids("ab"), ids("d"))

    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "group task-7: sample 1, 2, 3, 4, 5, 6, 7, 8 and 2 others left without a seal"
    )


def test_refused_group_is_named_in_one_warning(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    run = store.new_run()
    with Publisher(store.url, run) as publisher:
        publisher.trajectory("g", 0, num_samples=2).append(ids("ab"), ids("c")).result(10)
        with pytest.raises(ConflictError), publisher.group("g", 11):
            pass

    (warning,) = [each for each in caplog.messages if "was opened with 2 samples, not 11" in each]
    assert "trajectory g/0/0, g/1/0" in warning
    assert "g/7/0 and 3 others failed: " in warning
