"""State, reason and events of one trajectory.

The HTTP API describes them with the words of these classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import redis
from pydantic import Field

from turnstream.batching.merge.plan import Manifest, TrajectoryPlan
from turnstream.batching.scoring.rewards import with_posted_reward
from turnstream.errors import RejectedError
from turnstream.records.manifests import decode_manifest
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import parsed_number, reading
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
from turnstream_server.ledger.core.frontier import Frontier, read_frontier
from turnstream_server.ledger.core.scan import (
    entry_ms,
    hash_fields,
    readable_events,
    stream_entries,
)
from turnstream_server.ledger.planning.manifests import read_plan
from turnstream_server.ledger.queries.ledger import STATES_WITH_REASON, parse_entry
from turnstream_server.ledger.release.compact_records import (
    find_past_end,
    find_past_step,
    lost_records,
)


class TrajectoryNotFoundError(RejectedError):
    """The run has no record of this trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEvent:
    """An event of a trajectory."""

    name: Annotated[str, Field(examples=["sealed"])]
    details: Annotated[str, Field(examples=["completed, reward 1"])]
    at_ms: Annotated[int, Field(description="Time of the store in milliseconds.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One trajectory, with its stored events in order."""

    run: str
    trajectory_id: Annotated[str, Field(examples=["task-7/0/0"])]
    state: TrajectoryState
    reason: Annotated[str, Field(description="Why it is not trained; empty in the other states.")]
    reward: Annotated[
        float | None, Field(description="In the plan; before it, the posted one or of the seal.")
    ]
    step: Annotated[int | None, Field(description="The batch that it is planned in.")]
    advantage: float | None
    events: tuple[TrajectoryEvent, ...]
    is_whole: Annotated[bool, Field(description="Whether the oldest event is still stored.")]


def read_history(client: redis.Redis, run: str, name: str) -> Trajectory:
    """Return the history of a trajectory by its readable name or its id.

    Raises:
        TrajectoryNotFoundError: the run has no record of it, or the name is malformed.
    """
    try:
        meant = keys_named(name)
    except ValueError as error:
        raise TrajectoryNotFoundError(
            f"{name!r} is no trajectory: <group>/<sample>/<attempt>"
        ) from error
    for key in meant:
        entry = _ledger_entry(client, run, key)
        if entry is not None:
            return _history(client, run, key, entry)
    shown = keys.readable_name(meant[-1].trajectory_id)
    lost = lost_records(client, run)
    if lost:
        raise TrajectoryNotFoundError(f"run {run!r} has no record of {shown!r}: {lost}")
    raise TrajectoryNotFoundError(f"run {run!r} has never had a trajectory {shown!r}")


def _history(client: redis.Redis, run: str, key: TrajectoryKey, entry: bytes) -> Trajectory:
    frontier = read_frontier(client, run)
    with reading(keys.run_keys(run).ledger, key.trajectory_id):
        state, rest = parse_entry(entry, frontier)
    step = int(rest) if entry.startswith(b"planned:") else None
    stored = _stored_events(readable_events(client, run, is_wanted=key.trajectory_id.__eq__), key)
    events = [event for event, _ in stored]
    reward, advantage = _posted_reward([event for _, event in stored]), None
    if step is not None:
        events += _step_events(step, frontier, _read_times(client, run))
        found = read_plan(client, run, step)
        plan = _find_in_manifest(found.manifest, key) if found else None
        if plan is not None:
            reward, advantage = plan.reward, plan.advantage
    return Trajectory(
        run=run,
        trajectory_id=key.trajectory_id,
        state=state,
        reason=rest if state in STATES_WITH_REASON else "",
        reward=reward,
        step=step,
        advantage=advantage,
        events=tuple(events),
        is_whole=any(isinstance(event, GroupOpened) for _, event in stored),
    )


def _ledger_entry(client: redis.Redis, run: str, key: TrajectoryKey) -> bytes | None:
    """Return the entry of a trajectory, from the ledger, compact records or plans."""
    ledger = keys.run_keys(run).ledger
    with reading(ledger), translating():
        entry: Any = client.hget(ledger, key.trajectory_id)
    if entry is not None:
        return entry
    end = find_past_end(client, run, key)
    if end is not None:
        return end.encode()
    step = _find_planned_step(client, run, key)
    if step is None:
        step = find_past_step(client, run, key)
    return None if step is None else b"planned:%d" % step


def _find_planned_step(client: redis.Redis, run: str, key: TrajectoryKey) -> int | None:
    """Return the step of a trajectory between the ledger and a compact record."""
    plan = keys.run_keys(run).plan
    for entry_id, record in stream_entries(client, plan, page=1):
        if key.group_id.encode() not in record:
            continue  # to decode a plan takes a thousand times as long
        with reading(plan, entry_id):
            manifest = decode_manifest(record)
        if _find_in_manifest(manifest, key):
            return manifest.step
    return None


def _find_in_manifest(manifest: Manifest, key: TrajectoryKey) -> TrajectoryPlan | None:
    plans = (plan for group in manifest.groups for plan in group.trajectories)
    return next((plan for plan in plans if plan.key == key), None)


def _stored_events(
    stored: Iterable[tuple[str, Event]], key: TrajectoryKey
) -> list[tuple[TrajectoryEvent, Event]]:
    """Return the events of a trajectory in order; a repeated one counts once."""
    found: dict[tuple[str, str], tuple[TrajectoryEvent, Event]] = {}
    for entry_id, event in stored:
        words = _words_of(event, key)
        if words and words not in found:
            name, details = words
            shown = TrajectoryEvent(name=name, details=details, at_ms=entry_ms(entry_id))
            found[words] = shown, event
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
            parsed_number(name.partition(":")[2].encode())  # the step
            times[name] = parsed_number(ms)
    return times


def _posted_reward(events: list[Event]) -> float | None:
    """Return the posted reward, else that of the newest seal; None if neither has one."""
    posted = next((event for event in events if isinstance(event, RewardPosted)), None)
    for event in reversed(events):
        if isinstance(event, SealedTrajectory):
            return (event if posted is None else with_posted_reward(event, posted)).reward
    return None
