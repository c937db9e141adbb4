"""What became of one trajectory, pieced together from ledger, payload, events and plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis

from turnstream.batching.plan import Manifest, TrajectoryPlan
from turnstream.batching.rewards import with_posted_reward
from turnstream.errors import RejectedError
from turnstream.records.manifests import decode_manifest
from turnstream.store import keys
from turnstream.store.replies import translating
from turnstream.store.stored import StoredHash, parsed_number, reading
from turnstream.store.trajectory_names import keys_named
from turnstream.types import (
    Event,
    GroupOpened,
    RewardPosted,
    SealedTrajectory,
    TrajectoryKey,
    TrajectoryState,
)
from turnstream_server.bus.frontier import read_frontier
from turnstream_server.bus.lives import LifeEntry, Traces, is_of, is_whole, life_of
from turnstream_server.bus.manifests import read_plan
from turnstream_server.bus.openings import openings_in_snapshot
from turnstream_server.bus.pages import (
    entry_ms,
    hash_fields,
    readable_events,
    server_ms,
    stream_entries,
)
from turnstream_server.bus.past import find_past_end, find_past_step
from turnstream_server.bus.states import STATES_WITH_REASON, parse_entry

_HELD: Final = frozenset(
    {TrajectoryState.OPEN, TrajectoryState.SEALED, TrajectoryState.AWAITING_REWARD}
)
"""States in which the ledger has the lease epoch."""


class TrajectoryNotFoundError(RejectedError):
    """The ledger of the run has never had this trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryHistory:
    """One trajectory, as far as the store still knows. None where it does not, or it is not so.

    Attributes:
        reason: why it is not trained; empty if it is, or may still be.
        opened_ms: when its group was opened, by the server's clock.
        writer: who writes or wrote it.
        num_turns: turns stored so far.
        num_bytes: bytes of their records.
        sealed_ms: when the run was told of its seal.
        reward: the one that its batch was planned with, else the one that was posted, or of its
            seal.
        step, mini_batch: where it is planned.
        payload_is_kept: whether its turns can still be read.
        entries: what happened to it, in order.
        is_whole: whether no event is gone that may have told of it.
    """

    run: str
    trajectory_id: str
    state: TrajectoryState
    reason: str
    opened_ms: int | None = None
    writer: str | None = None
    lease_epoch: int | None = None
    num_turns: int | None = None
    num_bytes: int | None = None
    sealed_ms: int | None = None
    status: str | None = None
    reward: float | None = None
    oldest_version: int | None = None
    newest_version: int | None = None
    step: int | None = None
    mini_batch: int | None = None
    advantage: float | None = None
    payload_is_kept: bool = False
    entries: tuple[LifeEntry, ...] = ()
    is_whole: bool = True


def read_history(
    client: redis.Redis, run: str, name: str, *, folder: Path | None = None
) -> TrajectoryHistory:
    """What is known of the trajectory that somebody names, as it is read or by its id.

    Raises:
        LedgerFileError: it may be in a file that is not at hand.
        TrajectoryNotFoundError: it was never opened, or the name is none.
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    *before, last = _keys_named(name)
    for key in before:
        with contextlib.suppress(TrajectoryNotFoundError):
            return history_of(client, run, key, folder=folder)
    return history_of(client, run, last, folder=folder)


def history_of(
    client: redis.Redis, run: str, key: TrajectoryKey, *, folder: Path | None = None
) -> TrajectoryHistory:
    """What the store, and the archive folder where there is one, know of one trajectory.

    Raises:
        LedgerFileError: it may be in a file that is not at hand.
        TrajectoryNotFoundError: it was never opened.
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    trajectory_id = key.trajectory_id
    frontier = read_frontier(client, run)
    ledger = keys.run_keys(run).ledger
    with reading(ledger), translating():
        value: Any = client.hget(ledger, trajectory_id)
    if value is None:
        value = _past_entry(client, run, key, folder=folder)
    with reading(ledger, trajectory_id):
        state, rest = parse_entry(value, frontier)
        holder = _holder(rest) if state in _HELD else {}
    events = tuple(_events_of(client, run, key))
    facts = _event_facts(client, run, key, events) | _payload_facts(client, run, trajectory_id)
    facts |= holder
    if value.startswith(b"planned:"):
        facts |= _planned_facts(client, run, key, step=int(rest))
    traces = Traces(
        key=key,
        state=state,
        frontier=frontier,
        reason=rest if state in STATES_WITH_REASON else "",
        events=events,
        **{name: facts.get(name) for name in ("opened_ms", "step", "writer", "lease_epoch")},
        **_notes(client, run, trajectory_id),
    )
    return TrajectoryHistory(
        run=run,
        trajectory_id=trajectory_id,
        state=state,
        reason=traces.reason,
        entries=life_of(traces, now_ms=server_ms(client)),
        is_whole=is_whole(traces),
        **facts,
    )


def _past_entry(client: redis.Redis, run: str, key: TrajectoryKey, *, folder: Path | None) -> bytes:
    """The ledger entry that a trajectory had, from the compact records, or the plans before them.

    Raises:
        TrajectoryNotFoundError: none of them names it.
    """
    end = find_past_end(client, run, key)
    if end is not None:
        return end.encode()
    step = _find_planned_step(client, run, key)
    if step is None:
        step = find_past_step(client, run, key, folder=folder)
    if step is None:
        name = keys.readable_name(key.trajectory_id)
        raise TrajectoryNotFoundError(f"run {run!r} has never had a trajectory {name!r}")
    return b"planned:%d" % step


def _find_planned_step(client: redis.Redis, run: str, key: TrajectoryKey) -> int | None:
    """The step of a trajectory that is on its way from the ledger into a compact record."""
    plan = keys.run_keys(run).plan
    for entry_id, record in stream_entries(client, plan):
        with reading(plan, entry_id):
            manifest = decode_manifest(record)
        if find_in_manifest(manifest, key):
            return manifest.step
    return None


def find_in_manifest(manifest: Manifest, key: TrajectoryKey) -> tuple[int, TrajectoryPlan] | None:
    """The mini-batch that a trajectory is planned in, and its plan; None if it is in none."""
    for index, mini_batch in enumerate(manifest.mini_batches):
        stop = mini_batch.first_group + mini_batch.num_groups
        for group in manifest.groups[mini_batch.first_group : stop]:
            for plan in group.trajectories:
                if plan.key == key:
                    return index, plan
    return None


def _keys_named(name: str) -> tuple[TrajectoryKey, ...]:
    try:
        return keys_named(name)
    except ValueError as error:
        raise TrajectoryNotFoundError(
            f"{name!r} is no trajectory: <group>/<sample>/<attempt>"
        ) from error


def _events_of(client: redis.Redis, run: str, key: TrajectoryKey) -> Iterator[tuple[str, Event]]:
    for entry_id, event in readable_events(client, run):
        if is_of(event, key):
            yield entry_id, event


def _event_facts(
    client: redis.Redis, run: str, key: TrajectoryKey, events: Sequence[tuple[str, Event]]
) -> dict[str, Any]:
    """When it was opened and sealed, and how, as far as events are kept."""
    facts: dict[str, Any] = {}
    posted = next((event for _, event in events if isinstance(event, RewardPosted)), None)
    for entry_id, event in events:
        if isinstance(event, GroupOpened):
            facts.setdefault("opened_ms", entry_ms(entry_id))
        elif isinstance(event, SealedTrajectory):
            facts.setdefault("sealed_ms", entry_ms(entry_id))
            if posted is not None:
                event = with_posted_reward(event, posted)
            facts |= {
                "status": event.status.value,
                "reward": event.reward,
                "oldest_version": event.oldest_version,
                "newest_version": event.newest_version,
            }
    if "opened_ms" not in facts:
        born_ms = openings_in_snapshot(client, run).get(keys.encode_name(key.group_id))
        facts |= {} if born_ms is None else {"opened_ms": born_ms}
    return facts


def _notes(client: redis.Redis, run: str, trajectory_id: str) -> dict[str, Any]:
    """What hashes of the run have noted of it, or of its step."""
    names = keys.run_keys(run)
    with reading(names.letters, trajectory_id), translating():
        letter: Any = client.hget(names.letters, trajectory_id)
        died_ms = None if letter is None else parsed_number(letter.partition(b":")[0])
    with reading(names.rewards, trajectory_id), translating():
        posted: Any = client.hget(names.rewards, trajectory_id)
        said = (posted or b"").decode()
    times: dict[str, int] = {}
    for name, ms in hash_fields(client, names.times):
        with reading(names.times, name):
            parsed_number(name.partition(":")[2].encode())  # of a step
            times[name] = parsed_number(ms)
    return {"died_ms": died_ms, "posted": said, "times": times}


def _payload_facts(client: redis.Redis, run: str, trajectory_id: str) -> dict[str, Any]:
    """What the place of the payload says."""
    names = keys.trajectory_keys(run, trajectory_id)
    with reading(names.meta), translating():
        fields: Any = client.hgetall(names.meta)
        is_kept = bool(client.exists(names.turns))
    stored = StoredHash(names.meta, fields)
    writer = stored.parsed("writer", lambda value: keys.decode_name(value.decode()), None)
    if writer is None:
        return {"payload_is_kept": is_kept}
    return {
        "payload_is_kept": is_kept,
        "writer": writer,
        "lease_epoch": stored.needed("epoch", parsed_number),
        "num_turns": stored.needed("turns", parsed_number),
        "num_bytes": stored.needed("bytes", parsed_number),
    }


def _holder(rest: str) -> dict[str, Any]:
    """Who holds an open trajectory, which may have no turn yet, or be taken over since its last.

    Of one that is sealed the ledger has the epoch, and no more.

    >>> _holder("2:gen%201"), _holder("2")
    ({'writer': 'gen 1', 'lease_epoch': 2}, {'lease_epoch': 2})
    """
    epoch, _, writer = rest.partition(":")
    held = {"writer": keys.decode_name(writer)} if writer else {}
    return held | {"lease_epoch": int(epoch)}


def _planned_facts(
    client: redis.Redis, run: str, key: TrajectoryKey, *, step: int
) -> dict[str, Any]:
    facts: dict[str, Any] = {"step": step}
    found = read_plan(client, run, step)
    place = find_in_manifest(found.manifest, key) if found else None
    if place is None:
        return facts
    mini_batch, plan = place
    return facts | {
        "mini_batch": mini_batch,
        "reward": plan.reward,
        "advantage": plan.advantage,
        "status": plan.status.value,
    }
