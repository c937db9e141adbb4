"""Bytes are reserved when a group is opened; a group waits if there are too few."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from testkit.runs.run_driver import Drive, RunDriver
from turnstream.errors import GroupTooLargeError, RejectedError
from turnstream.store.client.fullness import FIRST_ESTIMATE
from turnstream.store.client.scripts import run_command
from turnstream.store.run.groups import FIRST_BYTES, reserve_command, settled_lease
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.queries.ledger import read_budget

pytestmark = pytest.mark.redis

OVERHEAD = 4096
LEAST = FIRST_BYTES + OVERHEAD


def seal(run: Any, trajectory_id: str, num_bytes: int) -> None:
    lease = settled_lease(1, "", awaits_reward=False, num_bytes=num_bytes)
    assert run.do(run.post_sealed(trajectory_id, lease, b"seal")) == [b"OK"]


@pytest.fixture
def full_run(drive: Drive) -> Iterator[RunDriver]:
    """A run on a server with 50 MB of memory."""
    with (
        EmbeddedServer(max_memory_bytes=50_000_000) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        yield drive(on=client, batch_groups=1, max_staleness=1000)


def settled(writer: str) -> str:
    return settled_lease(1, writer, awaits_reward=False, num_bytes=900)


def grow(run: Any, trajectory_id: str, num_bytes: int, *, epoch: int = 1, writer: str = "w") -> int:
    wanted = [(trajectory_id, epoch, num_bytes)]
    return run_command(run.client, reserve_command(run.name, wanted, writer=writer))[0]


def held(run: Any) -> tuple[int, int, int]:
    bytes_held = read_budget(run.client, run.name)
    return bytes_held.reserved, bytes_held.stored, bytes_held.planned


def test_each_sample_holds_bytes_and_each_attempt_its_own(drive: Drive) -> None:
    run = drive(batch_groups=1, max_bytes=2 * FIRST_ESTIMATE)
    run.do(run.open_group("g/0/0"))
    opened = held(run)
    run.do(run.open_group("g/1/0"))
    run.do(run.abandon("g/0/0"))

    run.do(run.open_group("g/0/1"))  # which never waits

    assert opened == (2 * FIRST_ESTIMATE, 0, 0)
    assert held(run) == (3 * FIRST_ESTIMATE, 0, 0)


@pytest.mark.parametrize(
    ("sealed", "reserved"),
    [([100_000, 300_000], 200_000 + OVERHEAD), ([10, 10], LEAST)],
    ids=["the mean", "what a writer takes for granted"],
)
def test_estimate_is_learned_from_sealed_trajectories(
    drive: Drive, sealed: list[int], reserved: int
) -> None:
    run = drive(max_staleness=1000)
    run.do(run.open_group("a/0/0", "a/1/0", group="a"))
    for sample, size in enumerate(sealed):
        seal(run, f"a/{sample}/0", size)

    run.do(run.open_group("b/0/0", group="b", num_samples=1))

    assert held(run)[0] == reserved


def test_an_open_trajectory_grows_and_is_never_refused(drive: Drive) -> None:
    run = drive(batch_groups=1, max_bytes=FIRST_ESTIMATE)
    run.do(run.open_group("g/0/0", num_samples=1))

    granted = [grow(run, "g/0/0", size) for size in (1_000_000, 1_000_000, 500_000)]

    assert granted == [1_000_000, 1_000_000, 1_000_000]
    assert held(run) == (1_000_000 + OVERHEAD, 0, 0)


def test_only_the_writer_of_an_open_trajectory_grows_it(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0", "g/1/0"))
    seal(run, "g/1/0", 1)
    before = held(run)

    answers = [
        grow(run, "g/0/0", 10**6, epoch=2),
        grow(run, "g/0/0", 10**6, writer="x"),
        grow(run, "g/1/0", 10**6),
        grow(run, "x", 1),
    ]

    assert answers == [0, 0, 0, 0]
    assert held(run) == before
    assert grow(run, "g/0/0", 10**6) == 10**6


def test_group_above_the_budget_waits_and_gets_the_holders(drive: Drive) -> None:
    run = drive(batch_groups=1, max_staleness=1000, max_bytes=3 * FIRST_ESTIMATE)
    run.do(run.open_group("a/0/0", "a/1/0", group="a"))
    seal(run, "a/0/0", 60_000)

    with pytest.raises(RejectedError) as told:
        run.do(run.open_group(group="b"))

    assert told.value.retry_after_s is not None
    assert (
        f"129632 of max_bytes={3 * FIRST_ESTIMATE} are held: 65536 bytes by open trajectories, "
        "64096 by sealed ones, 0 by planned steps; the group needs 128192 bytes" in str(told.value)
    )
    assert run.client.hget(run.keys.groups, "b") is None


def test_evaluation_waits_for_bytes_even_while_the_trainer_is_idle(drive: Drive) -> None:
    run = drive(batch_groups=1, max_bytes=3 * FIRST_ESTIMATE)
    run.do(run.open_group("e/0/0", group="e", num_samples="2:eval"))
    assert held(run) == (2 * FIRST_ESTIMATE, 0, 0)

    with pytest.raises(RejectedError, match="131072 of max_bytes=196608 are held"):
        run.do(run.open_group("f/0/0", group="f", num_samples="2:eval"))
    run.do(run.open_group("e/1/0", group="e", num_samples="2:eval"))
    run.do(run.open_group("g/0/0", group="g"))


def test_evaluation_above_the_budget_is_refused_without_a_wait(drive: Drive) -> None:
    run = drive(batch_groups=1, max_bytes=3 * FIRST_ESTIMATE)

    with pytest.raises(GroupTooLargeError) as told:
        run.do(run.open_group("e/0/0", group="e", num_samples="4:eval"))
    run.do(run.open_group("f/0/0", group="f", num_samples="3:eval"))

    assert told.value.retry_after_s is None
    assert str(told.value) == (
        "group e needs 262144 bytes, 65536 for each of its 4 trajectories; max_bytes is 196608: "
        "evaluate with fewer samples, or raise it"
    )
    assert run.client.hkeys(run.keys.groups) == [b"f"]
    assert held(run) == (3 * FIRST_ESTIMATE, 0, 0)


@pytest.mark.parametrize("num_samples", ["4:eval", "3:eval", "1"])
def test_a_group_that_was_open_before_needs_no_bytes_again(drive: Drive, num_samples: str) -> None:
    # After a lower limit, groups that a power cut had lost could not be sent again.
    run = drive(batch_groups=1, max_staleness=1000, max_bytes=3 * FIRST_ESTIMATE)
    run.do(run.open_group("a/0/0", group="a", num_samples=3))

    with pytest.raises(RejectedError, match="max_bytes"):
        run.do(run.open_group("b/0/0", group="b", num_samples=num_samples))
    opened = run.do(run.open_group("b/0/0", group="b", num_samples=f"{num_samples}+"))

    assert opened == [1]
    assert held(run)[0] == (3 + int(num_samples[0])) * FIRST_ESTIMATE


def test_a_group_that_was_open_before_needs_capacity_again(drive: Drive) -> None:
    run = drive(batch_groups=1, max_staleness=0, max_planned_ahead=0)
    run.do(run.open_group("a/0/0", group="a", num_samples=1))

    with pytest.raises(RejectedError, match="1 groups are live, 1 are allowed"):
        run.do(run.open_group("b/0/0", group="b", num_samples="1+"))


@pytest.mark.parametrize(("purpose", "allowed", "refused"), [("", 13, 14), (":eval", 11, 13)])
def test_a_group_above_what_the_server_gives_is_refused_by_its_size(
    full_run: RunDriver, purpose: str, allowed: int, refused: int
) -> None:
    run = full_run
    run.client.hset(run.keys.budget, mapping={"estimate": 3_200_000, "settled": 1})

    with pytest.raises(GroupTooLargeError, match=r"of the 50000000 bytes .* it may have [34]\d{7}"):
        run.do(run.open_group(group="a", num_samples=f"{refused}{purpose}"))
    run.do(run.open_group(group="b", num_samples=f"{allowed}{purpose}"))


@pytest.mark.parametrize(
    ("lease", "becomes", "stored"),
    [
        ("1", "sealed:1", FIRST_ESTIMATE),
        ("1:awaits", "awaiting_reward:1", FIRST_ESTIMATE),
        ("1::w", "sealed:1", FIRST_ESTIMATE),
        ("1:awaits:w", "awaiting_reward:1", FIRST_ESTIMATE),
        ("1:/900:w", "sealed:1", 900 + OVERHEAD),
        ("1:awaits/900:w", "awaiting_reward:1", 900 + OVERHEAD),
        ("1:/900", "sealed:1", 900 + OVERHEAD),
        ("1/900", "sealed:1", 900 + OVERHEAD),
    ],
)
def test_a_seal_names_its_lease_with_what_it_knows(
    run: RunDriver, lease: str, becomes: str, stored: int
) -> None:
    run.do(run.open_group("g/0/0", num_samples=1))

    assert run.do(run.post_sealed("g/0/0", lease, b"seal")) == [b"OK"]

    assert run.client.hget(run.keys.ledger, "g/0/0") == becomes.encode()
    assert held(run) == (0, stored, 0)


@pytest.mark.parametrize("writer", ["a/7", "a:awaits/7", "/7", "7", "a:b"])
def test_seal_counts_for_any_writer_name_and_no_other_writer(run: RunDriver, writer: str) -> None:
    run.do(run.open_group("g/0/0", num_samples=1, writer=writer))

    other = run.do(run.post_sealed("g/0/0", settled("a"), b"seal"))
    own = run.do(run.post_sealed("g/0/0", settled(writer), b"seal"))

    assert other[0].startswith(b"FENCED g/0/0 is open:1:")
    assert own == [b"OK"]


def test_idle_trainer_gets_the_groups_of_its_next_step(drive: Drive) -> None:
    run = drive(batch_groups=2, max_staleness=1000, max_bytes=2 * 4096)

    run.do(run.open_group(group="a"))
    run.do(run.open_group(group="b"))

    with pytest.raises(RejectedError, match="max_bytes=8192"):
        run.do(run.open_group(group="c"))
    run.client.hset(run.keys.frontier, mapping={"planned": 1, "planned_groups": 2})
    with pytest.raises(RejectedError, match="max_bytes=8192"):
        run.do(run.open_group(group="c"))
    run.client.hset(run.keys.frontier, "stepped", 1)
    run.do(run.open_group(group="c"))


def test_a_group_waits_while_the_servers_memory_is_nearly_full(full_run: RunDriver) -> None:
    run = full_run
    run.do(run.open_group(group="a", num_samples=1))
    # Grown where it is: 40 MB that were sent would also fill the buffer of the server's file,
    # for as long as a busy disk takes, and so count twice.
    run.client.setrange("other", 39_999_999, b"x")

    with pytest.raises(
        RejectedError, match="maxmemory is 50000000, of which new groups may have 40000000"
    ):
        run.do(run.open_group(group="b", num_samples=1))
    run.client.hset(run.keys.frontier, mapping={"planned": 1, "planned_groups": 1, "stepped": 1})
    run.do(run.open_group(group="b", num_samples=1))
    run.client.delete("other")
    run.do(run.open_group(group="c", num_samples=1))


def test_reserved_bytes_of_open_trajectories_count_as_used(full_run: RunDriver) -> None:
    full_run.do(full_run.open_group("a/0/0", group="a", num_samples=1))

    grow(full_run, "a/0/0", 39_000_000)

    with pytest.raises(RejectedError, match="the store is full: it uses"):
        full_run.do(full_run.open_group(group="b", num_samples=1))
