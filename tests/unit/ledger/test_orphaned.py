"""Groups of a closed run without a writer."""

from __future__ import annotations

from turnstream_server.ledger.planning.deadlines import fire_orphaned
from turnstream_server.ledger.planning.ending import Attempt
from turnstream_server.ledger.planning.settling import GroupState


def group_of(state: str, *entries: bytes | None) -> GroupState:
    attempts = [Attempt(f"g/{sample}/0", each, None) for sample, each in enumerate(entries)]
    return GroupState("g", f"{len(entries)}:{state}".encode(), b"2:0:1:p", None, attempts)


def test_deadline_is_fired_only_if_no_attempt_has_changed() -> None:
    calls = list(fire_orphaned(group_of("open", b"sealed:1", None)).calls())

    assert ("FIELDS", "frontier", ("closed", b"=1")) in calls
    assert ("FIELDS", "ledger", ("g/0/0", b"=sealed:1", "g/1/0", b"")) in calls
    assert [name for name, _, _ in calls[-2:]] == ["XADD", "ZREM"]
