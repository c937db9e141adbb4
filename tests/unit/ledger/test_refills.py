"""Laws of a granted refill, without a store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.errors import ConflictError, RejectedError
from turnstream.types import TrajectoryKey
from turnstream_server.ledger.planning.groups import RefillFacts, grant
from turnstream_server.ledger.planning.settling import GroupState


def facts_of(
    entry: bytes | None, members: bytes | None, *, sample: int = 0, attempt: int = 1
) -> RefillFacts:
    return RefillFacts(
        key=TrajectoryKey("g", sample, attempt),
        group=GroupState("g", entry, members, None),
        revision=2,
        deadline_s=1.5,
        run_ms=100,
        now_ms=7,
    )


@given(st.booleans(), st.integers(0, 3), st.integers(0, 5), st.integers(0, 9), st.integers(1, 5))
def test_refill_is_granted_once_after_the_one_before(
    is_decided: bool, granted: int, highest: int, attempt: int, number: int
) -> None:
    entry = b"4:decided" if is_decided else b"4:open"
    members = b"3:%d:%d:uid" % (highest, granted)
    facts = facts_of(entry, members, attempt=attempt)
    if number > granted + 1:
        with pytest.raises(ConflictError, match=f"does not follow refill {granted}"):
            grant(facts, number=number, prompt_uid="uid")
        return

    changes = grant(facts, number=number, prompt_uid="uid")

    if number <= granted:
        assert changes is None
        return
    assert changes is not None
    calls = [*changes.calls()]
    for key, field, value in (
        ("groups", "g", b"=" + entry),
        ("members", "g", b"=" + members),
        ("ledger", f"g/0/{attempt}", b""),
        ("config", "newest", b"=2"),
    ):
        assert ("FIELDS", key, (field, value)) in calls
    entry_after = f"3:{max(highest, attempt)}:{number}:uid"
    assert ("HSET", "members", ("g", entry_after)) in calls
    assert ("HSET", "groups", ("g", "4:open")) in calls
    assert ("ZADD", "refills", (7, f"g/0/{attempt}")) in calls
    assert ("ZADD", "deadlines", (1_600, "group:g")) in calls
    assert (("HINCRBY", "frontier", ("open_groups", 1)) in calls) is is_decided


@pytest.mark.parametrize("entry", [b"4:planned", b"4:expired", b"4:evaluating"])
def test_group_that_needs_no_refill_gets_none(entry: bytes) -> None:
    assert grant(facts_of(entry, None), number=1, prompt_uid="uid") is None


def test_unknown_group_and_unknown_sample_are_refused() -> None:
    with pytest.raises(ConflictError, match="group g is unknown, or finished"):
        grant(facts_of(None, None), number=1, prompt_uid="uid")
    with pytest.raises(RejectedError, match="g/4/1 is none of the 4 samples of group g"):
        grant(facts_of(b"4:open", None, sample=4), number=1, prompt_uid="uid")
