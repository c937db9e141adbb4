"""Groups with many samples: refused above the limit before any write, opened whole below it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from testkit.runs.run_driver import Drive, RunDriver
from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.values import LARGEST_GROUP
from turnstream.errors import (
    GroupTooLargeError,
    InvalidConfigError,
    InvalidTurnError,
    RejectedError,
)
from turnstream.generator import Publisher
from turnstream.records.configs import encode_config
from turnstream.store.run.configs import revise_config
from turnstream.store.run.groups import settled_lease
from turnstream.store.run.tasks import Prompt, add_prompts
from turnstream_server.ledger.queries.ledger import read_budget

pytestmark = pytest.mark.redis

FEWER = BatchingConfig(batch_groups=100, mini_batch_groups=100, max_samples=3)


def contents(run: Any) -> dict[bytes, bytes]:
    """Every key of the run, but the clock, as it is stored."""
    found: Any = run.client.keys(f"*{run.name}*")
    return {key: run.client.dump(key) for key in found}


def test_largest_group_opens_and_seals_whole_with_all_samples(drive: Drive) -> None:
    # Above some 4,000 samples `unpack` failed after the group, its event and its reservation were
    # written: the caller got an error, and the group stayed open with its bytes reserved. As many
    # seals in one call were taken off the leases, and none of them was sealed.
    run = drive(max_samples=LARGEST_GROUP)
    ids = [f"g/{sample}/0" for sample in range(LARGEST_GROUP)]
    lease = settled_lease(1, "w", awaits_reward=False, num_bytes=100)

    epochs = run.do(run.open_group(*ids, num_samples=LARGEST_GROUP))
    opened = run.counts()
    sizes = [run.client.zcard(run.keys.leases), run.client.hlen(run.keys.payload_bytes)]
    replies = run.do(run.post_sealed(*(word for one in ids for word in (one, lease, b"seal"))))

    assert (epochs, replies) == ([1] * LARGEST_GROUP, [b"OK"] * LARGEST_GROUP)
    assert opened == {"accepted": LARGEST_GROUP, "open": LARGEST_GROUP}
    assert sizes == [LARGEST_GROUP, LARGEST_GROUP]
    assert run.counts() == {"accepted": LARGEST_GROUP, "sealed": LARGEST_GROUP}


def test_bad_arguments_of_groups_and_seals_change_nothing(run: RunDriver) -> None:
    # A million samples stopped the store for 4 s: only 2^31 - 1 bounded their number. An id without
    # an attempt raised in the script after the group had been written. The first seal was taken in
    # before the script failed at the epoch of the second.
    run.do(run.open_group("h/0/0", "h/1/0", group="h"))
    before = contents(run)

    for num_samples in (1025, 1_000_000, 2**31 - 1):
        with pytest.raises(GroupTooLargeError) as refused:
            run.do(run.open_group("g/0/0", num_samples=num_samples))
        assert str(refused.value) == (
            f"group g: num_samples={num_samples} is above max_samples=1024 of the run: "
            "use fewer samples, or revise max_samples"
        )
    for size, trajectory in [
        *(("0", "g/0/0"), ("2/3", "g/0/0"), ("x", "g/0/0"), ("2", "g/2/0"), ("2", "h/0/0")),
        *(("2", "g/0"), ("2", "g/0/x")),
    ]:
        with pytest.raises(RejectedError, match=r"INVALID (size|trajectory)"):
            run.do(run.open_group("g/1/0", trajectory, num_samples=size))
    with pytest.raises(RejectedError, match="INVALID trajectory h/1/0 has no lease epoch"):
        run.do(run.post_sealed("h/0/0", "1:", b"seal", "h/1/0", "x", b"seal"))

    assert contents(run) == before


def test_prompts_and_max_samples_of_the_run_fit_each_other(run: RunDriver) -> None:
    # A prompt of 5,000 samples was taken, and a revision below the samples of a stored one: each
    # further `next_task` of the run raised GroupTooLargeError.
    prompts = [Prompt(prompt_uid=f"p{n}", payload=b"", num_samples=4) for n in range(300)]
    large = Prompt(prompt_uid="q", payload=b"", num_samples=1025)
    before = contents(run)

    with pytest.raises(InvalidTurnError, match=r"num_samples: .* 1025 samples, .* max_samples="):
        add_prompts(run.client, run.name, [*prompts, large])
    assert contents(run) == before
    add_prompts(run.client, run.name, prompts[:1])
    before = contents(run)
    with pytest.raises(InvalidConfigError, match=r"max_samples: 3 is below the 4 samples"):
        revise_config(run.client, run.name, FEWER, from_step=1)
    assert contents(run) == before


def test_prompts_above_stored_revision_are_refused(run: RunDriver) -> None:
    revise_config(run.client, run.name, FEWER, from_step=5)

    with pytest.raises(InvalidTurnError, match="4 samples, above max_samples=3"):
        add_prompts(run.client, run.name, [Prompt(prompt_uid="a", payload=b"", num_samples=4)])


def test_known_group_stays_open_below_a_lowered_limit(drive: Drive) -> None:
    # A group that is open is not judged again: its generators open further samples of it.
    run = drive(max_samples=8)
    run.do(run.open_group("g/0/0", num_samples=8))
    run.client.hset(run.keys.config, "1", encode_config(dataclasses.replace(FEWER, max_samples=4)))

    assert run.do(run.open_group("g/7/0", num_samples=8)) == [1]


def test_publisher_refuses_groups_above_max_samples(run: RunDriver) -> None:
    # The publisher built a million keys, and the store stopped for everybody.
    options = run.client.connection_pool.connection_kwargs
    url = f"redis://{options['host']}:{options['port']}"

    with Publisher(url, run.name) as publisher:
        with pytest.raises(InvalidTurnError, match=r"num_samples: 1000000 is above 4096"):
            publisher.group("g", 1_000_000)
        with (
            pytest.raises(GroupTooLargeError, match="max_samples=1024"),
            publisher.group("g", 2000),
        ):
            pass

    assert run.ledger() == {}
    assert read_budget(run.client, run.name).reserved == 0
