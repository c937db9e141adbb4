from __future__ import annotations

import pytest

from testkit.runs.run_driver import RunDriver
from turnstream.errors import (
    ConflictError,
    FencedError,
)

pytestmark = pytest.mark.redis


def test_sealed_trajectories_are_posted_once(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0", "g/1/0"))
    post = run.post_sealed("g/0/0", 1, b"seal 0", "g/1/0", 1, b"seal 1")

    answers = [run.do(post), run.do(post)]

    assert answers == [[b"OK", b"OK"], [b"DUPLICATE", b"DUPLICATE"]]
    assert run.events() == [b"opened g", b"seal 0", b"seal 1"]
    assert run.ledger() == {b"g/0/0": b"sealed:1", b"g/1/0": b"sealed:1"}
    assert run.counts() == {"accepted": 2, "sealed": 2}


def test_seal_sent_again_after_its_group_was_decided_is_a_duplicate(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0"))
    run.do(run.post_sealed("g/0/0", 1, b"seal"))
    for state in ("planned:3", "filtered:flat", "incomplete:alone", "dead:crc"):
        run.client.hset(run.keys.ledger, "g/0/0", state)

        assert run.do(run.post_sealed("g/0/0", 1, b"seal")) == [b"DUPLICATE"]


def test_a_seal_counts_only_with_the_epoch_of_the_ledger(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0", "g/1/0"))
    run.do(run.post_sealed("g/1/0", 1, b"seal 1"))

    answers = run.do(
        run.post_sealed("g/0/0", 2, b"seal 0", "g/1/0", 2, b"seal 1", "g/2/0", 1, b"seal 2"),
    )

    assert [answer.split()[0] for answer in answers] == [b"FENCED"] * 3
    assert run.events() == [b"opened g", b"seal 1"]
    assert run.counts() == {"accepted": 2, "open": 1, "sealed": 1}


def test_a_seal_that_comes_after_its_group_was_decided_is_surplus(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0", "g/1/0"))
    run.client.hset(run.keys.groups, "g", "2:planned")

    assert run.do(run.post_sealed("g/0/0", 1, b"late")) == [b"SURPLUS"]

    assert run.events() == [b"opened g"]
    assert run.counts() == {"accepted": 2, "open": 1, "surplus": 1}
    assert run.ledger()[b"g/0/0"].startswith(b"surplus:")
    assert run.client.zrange(run.keys.leases, 0, -1) == [b"g/1/0"]


def test_abandoned_sample_is_counted_once_and_may_be_tried_again(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0"))

    answers = [run.do(run.abandon("g/0/0")) for _ in range(2)]
    (refused,) = run.do(run.post_sealed("g/0/0", 1, b"seal"))

    assert answers == [1, 0]
    assert refused.startswith(b"FENCED")
    assert run.ledger() == {b"g/0/0": b"abandoned:bored"}
    assert run.counts() == {"accepted": 1, "abandoned": 1}
    assert run.events() == [b"opened g", b"abandoned g/0/0"]
    assert run.do(run.open_group("g/0/1")) == [1]
    assert run.do(run.post_sealed("g/0/1", 1, b"seal")) == [b"OK"]
    assert run.counts() == {"accepted": 2, "abandoned": 1, "sealed": 1}


def test_only_the_holder_of_an_open_trajectory_can_abandon_it(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0", "g/1/0"))
    run.do(run.post_sealed("g/1/0", 1, b"seal"))

    refusals = run.do_all(
        [run.abandon("g/0/0", epoch=2), run.abandon("g/1/0"), run.abandon("g/7/0")]
    )

    assert [type(refusal) for refusal in refusals] == [FencedError, ConflictError, FencedError]
    assert run.ledger()[b"g/0/0"] == b"open:1:w"
