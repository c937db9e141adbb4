"""State, reason and events of one trajectory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis

from turnstream.batching.merge.plan import Manifest, TrajectoryPlan
from turnstream.batching.scoring.rewards import with_posted_reward
from turnstream.errors import RejectedError
from turnstream.records.manifests import decode_manifest
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import StoredHash, parsed_number, reading
from turnstream.store.client.trajectory_names import keys_named
from turnstream.types import (
    DeadlineFired,
    Event,
    GroupOpened,
    RefillGranted,
    RewardPosted,
    SealedTrajectory,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
)
from turnstream_server.bus.core.frontier import Frontier, read_frontier
from turnstream_server.bus.core.scan import entry_ms, hash_fields, readable_events, stream_entries
from turnstream_server.bus.planning.manifests import read_plan
from turnstream_server.bus.queries.states import STATES_WITH_REASON, parse_entry
from turnstream_server.bus.release.compact_records import find_past_end, find_past_step

_HELD: Final = frozenset(
    {TrajectoryState.OPEN, TrajectoryState.SEALED, TrajectoryState.AWAITING_REWARD}
)
"""States in which the ledger has the lease epoch."""


class TrajectoryNotFoundError(RejectedError):
    """The ledger of the run has never had this trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEvent:
    """One event of a trajectory.

    Attributes:
        name: for example "sealed" or "planned".
        details: further fields as text; may be empty.
        at_ms: time by the server's clock, in milliseconds.
    """

    name: str
    details: str = ""
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryHistory:
    """One trajectory as the store records it. None stands for a fact that the store does not have.

    Attributes:
        reason: cause of a state that is not trained; empty in the other states.
        writer: generator with the lease, or the last one.
        num_turns: turns stored so far.
        num_bytes: bytes of their records.
        reward: value in the plan; before planning, the posted one or that of the seal.
        step, mini_batch: place in the plan.
        payload_is_kept: whether the turns can be read.
        events: stored events of the trajectory, in the order of time.
        is_whole: whether the oldest event is still stored.
    """

    run: str
    trajectory_id: str
    state: TrajectoryState
    reason: str
    writer: str | None = None
    lease_epoch: int | None = None
    num_turns: int | None = None
    num_bytes: int | None = None
    status: str | None = None
    reward: float | None = None
    step: int | None = None
    mini_batch: int | None = None
    advantage: float | None = None
    payload_is_kept: bool = False
    events: tuple[TrajectoryEvent, ...] = ()
    is_whole: bool = True


def read_history(
    client: redis.Redis, run: str, name: str, *, folder: Path | None = None
) -> TrajectoryHistory:
    """Return the history of a trajectory by its readable name or its id.

    Raises:
        LedgerFileError: a file that may have it cannot be read.
        TrajectoryNotFoundError: it was never opened, or the name is malformed.
    """
    try:
        *before, last = keys_named(name)
    except ValueError as error:
        raise TrajectoryNotFoundError(
            f"{name!r} is no trajectory: <group>/<sample>/<attempt>"
        ) from error
    for key in before:
        with contextlib.suppress(TrajectoryNotFoundError):
            return history_of(client, run, key, folder=folder)
    return history_of(client, run, last, folder=folder)


def history_of(
    client: redis.Redis, run: str, key: TrajectoryKey, *, folder: Path | None = None
) -> TrajectoryHistory:
    """Return the history of a trajectory from the store and the archive folder.

    Raises:
        LedgerFileError: a file that may have it cannot be read.
        TrajectoryNotFoundError: it was never opened.
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
    step = int(rest) if value.startswith(b"planned:") else None
    stored = _stored_events(readable_events(client, run), key)
    facts = _seal_facts([event for _, event in stored])
    facts |= _payload_facts(client, run, trajectory_id) | holder
    events = [event for event, _ in stored]
    if step is not None:
        facts |= _plan_facts(client, run, key, step=step)
        events += _step_events(step, frontier, _read_times(client, run))
    return TrajectoryHistory(
        run=run,
        trajectory_id=trajectory_id,
        state=state,
        reason=rest if state in STATES_WITH_REASON else "",
        events=tuple(events),
        is_whole=any(isinstance(event, GroupOpened) for _, event in stored),
        **facts,
    )


def _past_entry(client: redis.Redis, run: str, key: TrajectoryKey, *, folder: Path | None) -> bytes:
    """Return the ledger entry of a finished trajectory, from compact records or plans.

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
    """Return the step of a trajectory between the ledger and a compact record."""
    plan = keys.run_keys(run).plan
    for entry_id, record in stream_entries(client, plan):
        with reading(plan, entry_id):
            manifest = decode_manifest(record)
        if _find_in_manifest(manifest, key):
            return manifest.step
    return None


def _find_in_manifest(manifest: Manifest, key: TrajectoryKey) -> tuple[int, TrajectoryPlan] | None:
    """Return (index of the mini-batch, plan) of a trajectory; None if it is in none."""
    for index, mini_batch in enumerate(manifest.mini_batches):
        stop = mini_batch.first_group + mini_batch.num_groups
        for group in manifest.groups[mini_batch.first_group : stop]:
            for plan in group.trajectories:
                if plan.key == key:
                    return index, plan
    return None


def _stored_events(
    stored: Iterable[tuple[str, Event]], key: TrajectoryKey
) -> list[tuple[TrajectoryEvent, Event]]:
    """Return the events of a trajectory in order; a repeated one counts once."""
    found: dict[tuple[str, str], tuple[TrajectoryEvent, Event]] = {}
    for entry_id, event in stored:
        words = _words_of(event, key)
        if words and words not in found:
            name, details = words
            told = TrajectoryEvent(name=name, details=details, at_ms=entry_ms(entry_id))
            found[words] = told, event
    return [*found.values()]


def _words_of(event: Event, key: TrajectoryKey) -> tuple[str, str] | None:
    """Return name and details of an event of a trajectory or its group; None for others.

    >>> mine = TrajectoryKey("g", 1)
    >>> _words_of(RewardPosted(key=mine, reward=1.0), mine)
    ('reward posted', '1')
    >>> _words_of(RefillGranted(key=TrajectoryKey("g", 0, 1), number=1), mine)
    """
    match event:
        case GroupOpened() if event.group_id == key.group_id:
            return "group opened", ""
        case DeadlineFired(awaited=None) if event.group_id == key.group_id:
            return "deadline fired", f"of its group, after {event.num_refills} refills"
        case DeadlineFired() if event.awaited == key:
            return "deadline fired", "of its reward"
        case RefillGranted(key=of) if (of.group_id, of.sample) == (key.group_id, key.sample):
            return "refill granted", f"attempt {of.attempt} of its sample"
        case SealedTrajectory() if event.key == key and event.awaits_reward:
            return "sealed", f"{event.status.value}, its reward comes later"
        case SealedTrajectory() if event.key == key:
            reward = "" if event.reward is None else f", reward {event.reward:g}"
            return "sealed", f"{event.status.value}{reward}"
        case RewardPosted() if event.key == key:
            named = [f"{name} {value:g}" for name, value in event.reward_components.items()]
            whole = [] if event.reward is None else [f"{event.reward:g}"]
            return "reward posted", ", ".join([*whole, *named])
        case TrajectoryAbandoned() if event.key == key:
            return "abandoned", event.reason
        case TrajectoryDied() if event.key == key:
            return "dead", event.reason
        case _:
            return None


def _step_events(
    step: int, frontier: Frontier, times: Mapping[str, int]
) -> Iterator[TrajectoryEvent]:
    """Yield plan, step and commit of a step, as far as their times are stored."""
    planned_ms = times.get(f"planned:{step}")
    if planned_ms is None:
        return
    yield TrajectoryEvent(name="planned", details=f"in step {step}", at_ms=planned_ms)
    stepped_ms = times.get(f"stepped:{step}")
    if stepped_ms is not None and step <= frontier.stepped:
        yield TrajectoryEvent(name="stepped", details=f"in step {step}", at_ms=stepped_ms)
    checkpoints = [int(name.partition(":")[2]) for name in times if name.startswith("committed:")]
    by = min((each for each in checkpoints if step <= each <= frontier.committed), default=None)
    if by is not None:
        details = f"by the checkpoint of step {by}"
        yield TrajectoryEvent(name="committed", details=details, at_ms=times[f"committed:{by}"])


def _read_times(client: redis.Redis, run: str) -> dict[str, int]:
    """Return the recorded times of steps, in milliseconds; see `times` in store.keys."""
    times: dict[str, int] = {}
    key = keys.run_keys(run).times
    for name, ms in hash_fields(client, key):
        with reading(key, name):
            parsed_number(name.partition(":")[2].encode())  # of a step
            times[name] = parsed_number(ms)
    return times


def _seal_facts(events: list[Event]) -> dict[str, Any]:
    """Return status and reward from the stored events."""
    posted = next((event for event in events if isinstance(event, RewardPosted)), None)
    for event in reversed(events):
        if isinstance(event, SealedTrajectory):
            seal = event if posted is None else with_posted_reward(event, posted)
            return {"status": seal.status.value, "reward": seal.reward}
    return {}


def _payload_facts(client: redis.Redis, run: str, trajectory_id: str) -> dict[str, Any]:
    """Return writer and size of the payload."""
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
    """Return epoch and writer from the ledger entry; a sealed one has the epoch alone.

    >>> _holder("2:gen%201"), _holder("2")
    ({'writer': 'gen 1', 'lease_epoch': 2}, {'lease_epoch': 2})
    """
    epoch, _, writer = rest.partition(":")
    held = {"writer": keys.decode_name(writer)} if writer else {}
    return held | {"lease_epoch": int(epoch)}


def _plan_facts(client: redis.Redis, run: str, key: TrajectoryKey, *, step: int) -> dict[str, Any]:
    """Return the place, reward and advantage that a stored plan has for a trajectory."""
    facts: dict[str, Any] = {"step": step}
    found = read_plan(client, run, step)
    place = _find_in_manifest(found.manifest, key) if found else None
    if place is None:
        return facts
    mini_batch, plan = place
    return facts | {
        "mini_batch": mini_batch,
        "reward": plan.reward,
        "advantage": plan.advantage,
        "status": plan.status.value,
    }
