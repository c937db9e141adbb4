"""A granted refill: from what the store holds of a group and an attempt to `Changes`."""

from __future__ import annotations

from dataclasses import dataclass

from turnstream.errors import ConflictError, RejectedError
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.trajectory_names import with_readable_names
from turnstream.types import RefillGranted, TrajectoryKey
from turnstream_server.ledger.leadership.writes import Changes
from turnstream_server.ledger.planning.settling import GroupState


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillFacts:
    """The facts in the store about a refill.

    Attributes:
        key: the first attempt of the sample that was neither opened nor granted.
        group: its group, without attempts.
        revision: number of the config in force.
        deadline_s: what this config gives a group; 0 for none.
        run_ms: the time of the run.
        now_ms: the time of the server.
    """

    key: TrajectoryKey
    group: GroupState
    revision: int
    deadline_s: float
    run_ms: int
    now_ms: int


def grant(facts: RefillFacts, *, number: int, prompt_uid: str) -> Changes | None:
    """Return the writes that grant an attempt; None where it was granted, or the group needs none.

    A decided group is open again, and its deadline restarts.

    Raises:
        ConflictError: no such group, or a finished one; or a refill before was not granted.
        CorruptRecordError: the entry of the group in `members` is damaged.
        RejectedError: the group has no such sample.
    """
    group, trajectory_id = facts.group, keys.trajectory_id(facts.key)
    if group.entry is None:
        raise _refused(ConflictError, f"group {group.name} is unknown, or finished")
    if group.state not in {"open", "decided"}:
        return None
    if facts.key.sample >= group.num_samples:
        message = f"trajectory {trajectory_id} is none of the {group.num_samples} samples of group"
        raise _refused(RejectedError, f"{message} {group.name}")
    if number <= group.num_granted:
        return None
    if number > group.num_granted + 1:
        message = f"refill {number} of group {group.name} does not follow refill"
        raise _refused(ConflictError, f"{message} {group.num_granted}")
    changes = Changes()
    changes.expect("groups", group.name, group.entry)
    changes.expect("members", group.name, group.members)
    changes.expect("ledger", trajectory_id, None)
    changes.expect("config", "newest", b"%d" % facts.revision)
    highest = max(group.highest, facts.key.attempt)
    entry = f"{group.num_needed}:{highest}:{number}:{prompt_uid}"
    changes.write("HSET", "members", group.name, entry)
    changes.write("HSET", "groups", group.name, f"{group.num_samples}:open")
    if group.state == "decided":
        changes.add("frontier", "open_groups", 1)
    changes.write("ZADD", "refills", facts.now_ms, trajectory_id)
    if facts.deadline_s > 0:
        due_ms = facts.run_ms + round(facts.deadline_s * 1_000)
        changes.write("ZADD", "deadlines", due_ms, f"group:{group.name}")
    changes.write_entry("events", encode_event(RefillGranted(key=facts.key, number=number)))
    changes.wake()
    return changes


def _refused(kind: type[RejectedError], message: str) -> RejectedError:
    return kind(with_readable_names(message))
