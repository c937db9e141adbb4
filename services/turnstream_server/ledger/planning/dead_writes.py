"""The writes of dead letters: from facts about trajectories and events to `Changes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from turnstream.batching.planning.plan_batch import event_order
from turnstream.errors import ConflictError
from turnstream.records.events import encode_event
from turnstream.store.client.trajectory_names import with_readable_names
from turnstream.types import TrajectoryDied, TrajectoryKey
from turnstream_server.ledger.leadership.writes import Changes
from turnstream_server.ledger.planning.ending import Attempt

MAX_KEPT_BYTES: Final = 4_096
"""Bytes of a rejected event's record that are kept, at most."""

MAX_KEPT_EVENTS: Final = 1_000
"""Rejected events of a run that are kept, at most; the oldest are removed."""

_SEALED: Final = ("sealed", "awaiting_reward")


class Rejection(NamedTuple):
    """An event that counts for nothing, why, and the sealed trajectory that ends by it, if any."""

    event_id: str
    reason: str
    key: TrajectoryKey | None


class RejectionFacts(NamedTuple):
    """The facts in the store about an event to reject.

    Attributes:
        attempt: the trajectory that it names, or None.
        fields: the fields of its entry; none where it is deleted.
    """

    rejection: Rejection
    attempt: Attempt | None
    fields: Mapping[bytes, bytes]


def write_death(changes: Changes, attempt: Attempt, died: TrajectoryDied, *, now_ms: int) -> None:
    """Add the death of a trajectory: its state, its dead letter and its event.

    >>> changes = Changes()
    >>> died = TrajectoryDied(key=TrajectoryKey("g", 0), reason="checksum")
    >>> write_death(changes, Attempt("g/0/0", b"sealed:1", b"70"), died, now_ms=5)
    >>> [words for _, key, words in changes.calls() if key in ("ledger", "dead_letters")]
    [('g/0/0', b'=sealed:1'), ('g/0/0', 'dead:checksum'), ('g/0/0', '5:70')]
    """
    name, num_bytes = attempt.trajectory_id, attempt.stored_bytes
    changes.expect("ledger", name, attempt.entry)
    changes.write("HSET", "ledger", name, f"dead:{died.reason}")
    changes.write("ZREM", "deadlines", f"reward:{name}")
    changes.write("HSET", "dead_letters", name, f"{now_ms}:{num_bytes}")
    changes.write_entry("events", encode_event(died))
    changes.add("counts", attempt.state, -1)
    changes.add("counts", "dead", 1)
    changes.add("counts", "dead_bytes", num_bytes)


def mark_dead(attempt: Attempt, died: TrajectoryDied, *, now_ms: int) -> Changes | None:
    """Return the writes that mark a sealed trajectory as dead; None where it is dead.

    Raises:
        ConflictError: it is not sealed, or already in a batch.
    """
    if attempt.state == "dead":
        return None
    if attempt.state not in _SEALED:
        entry = (attempt.entry or b"unknown").decode(errors="replace")
        raise ConflictError(with_readable_names(f"{attempt.trajectory_id} is {entry}, not sealed"))
    changes = Changes()
    write_death(changes, attempt, died, now_ms=now_ms)
    return changes


def reject(events: Sequence[RejectionFacts], *, newest: Sequence[str], now_ms: int) -> Changes:
    """Return the writes that reject events: no leader folds them from now on.

    A sealed trajectory of an event becomes a dead letter. Any other event is kept itself, unless
    its trajectory is dead.

    Args:
        events: facts of the events.
        newest: id of the newest event that is kept, and of the newest rejected one; "0-0" before
            the first. An event from before them cannot be added to the kept ones.
        now_ms: the time of the server.
    """
    changes = Changes()
    changes.expect_newest("damaged", newest[0])
    last = max(map(event_order, newest))
    dead = set[str]()
    for (event_id, reason, key), attempt, fields in events:
        changes.write("ZADD", "rejected", event_id.partition("-")[0], event_id)
        name = "" if attempt is None else attempt.trajectory_id
        if attempt is not None and key is not None and attempt.state in _SEALED:
            if name not in dead:
                died = TrajectoryDied(key=key, reason=reason)
                write_death(changes, attempt, died, now_ms=now_ms)
            dead.add(name)
        elif (attempt is None or attempt.state != "dead") and event_order(event_id) > last:
            last = event_order(event_id)
            _keep(changes, event_id, reason, fields)
    return changes


def _keep(changes: Changes, event_id: str, reason: str, fields: Mapping[bytes, bytes]) -> None:
    pairs = b"\n".join(word for pair in fields.items() for word in pair)
    record = fields.get(b"r", pairs)
    if len(record) > MAX_KEPT_BYTES:
        reason += f" (the first {MAX_KEPT_BYTES} of {len(record)} bytes are kept)"
    record = record[:MAX_KEPT_BYTES]
    limit = ("MAXLEN", MAX_KEPT_EVENTS)
    changes.write("XADD", "damaged", *limit, event_id, "r", record, "why", reason)
