"""What happened to one trajectory, in order, from what the store still has of it. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from turnstream.types import (
    DeadlineFired,
    Event,
    GroupOpened,
    RefillGranted,
    RewardPosted,
    RolledBack,
    SealedTrajectory,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
)
from turnstream_server.bus.frontier import Frontier
from turnstream_server.bus.pages import entry_ms
from turnstream_server.bus.states import STATES_WITH_REASON

_UNKNOWN: Final = "when is no longer known"
_NOT_NOTED: Final = "when is not noted"
_LATE: Final = "late:"
_MISSED: Final = "missed"
_TRAINED: Final = (TrajectoryState.PLANNED, TrajectoryState.STEPPED, TrajectoryState.COMMITTED)
_WERE_SEALED: Final = frozenset(
    {
        *(TrajectoryState.SEALED, TrajectoryState.AWAITING_REWARD, TrajectoryState.DEAD),
        *_TRAINED,
    }
)
_TOLD_BY_EVENTS: Final = {
    TrajectoryState.ABANDONED: "abandoned",
    TrajectoryState.DEAD: "dead",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeEntry:
    """One thing that happened to a trajectory.

    Attributes:
        what: in a word or two.
        text: what else there is to say; that it is no longer known when, where that is so.
        at_ms: when, by the server's clock; None where that is not known.
        age_s: seconds since.
    """

    what: str
    text: str = ""
    at_ms: int | None = None
    age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """What the store has of one trajectory.

    Attributes:
        reason: why it is not trained; empty if it is, or may still be.
        events: (id, event) of those that are of it or of its group, and of rollbacks, in order.
        opened_ms: when its group was opened.
        step: where it is planned.
        times: see `times` in store.keys.
        writer, lease_epoch: who writes or wrote it.
        died_ms: since when it is a dead letter.
        posted: what `rewards` has of it, see store.keys; empty without a reward of its own.
    """

    key: TrajectoryKey
    state: TrajectoryState
    frontier: Frontier
    reason: str = ""
    events: tuple[tuple[str, Event], ...] = ()
    opened_ms: int | None = None
    step: int | None = None
    times: Mapping[str, int] = field(default_factory=dict[str, int])
    writer: str | None = None
    lease_epoch: int | None = None
    died_ms: int | None = None
    posted: str = ""


def is_of(event: Event, key: TrajectoryKey) -> bool:
    """Whether an event tells of a trajectory, of its group, or of a rollback.

    >>> mine = TrajectoryKey("g", 1)
    >>> other = RefillGranted(key=TrajectoryKey("g", 0, 1), number=1)
    >>> is_of(RewardPosted(key=mine, reward=1.0), mine), is_of(other, mine)
    (True, False)
    """
    match event:
        case GroupOpened(group_id=group_id):
            return group_id == key.group_id
        case DeadlineFired(group_id=group_id, awaited=awaited):
            return group_id == key.group_id and awaited in (None, key)
        case RefillGranted(key=of):
            return (of.group_id, of.sample) == (key.group_id, key.sample)
        case (
            SealedTrajectory(key=of)
            | RewardPosted(key=of)
            | TrajectoryAbandoned(key=of)
            | TrajectoryDied(key=of)
        ):
            return of == key
        case _:
            return isinstance(event, RolledBack)


def life_of(traces: Traces, *, now_ms: int) -> tuple[LifeEntry, ...]:
    """What happened to a trajectory, in order, and what is no longer known of it.

    What has no time stands behind what it follows in any life.

    >>> frontier = Frontier(
    ...     planned=1, stepped=1, committed=0, session_epoch=1, session="s", dp_world_size=1,
    ...     lineage="main", num_opened_groups=1, num_live_groups=1, is_closed=False,
    ... )
    >>> key = TrajectoryKey("g", 0)
    >>> posted = ("7000-0", RewardPosted(key=key, reward=0.5))
    >>> traces = Traces(
    ...     key=key, state=TrajectoryState.STEPPED, frontier=frontier, events=(posted,),
    ...     opened_ms=2_000, step=1, times={"planned:1": 8_000, "stepped:1": 9_000},
    ... )
    >>> for entry in life_of(traces, now_ms=10_000):
    ...     print((entry.age_s, entry.what, entry.text))
    (8.0, 'group opened', '')
    (None, 'sealed', 'when is no longer known')
    (3.0, 'reward posted', '0.5')
    (2.0, 'planned', 'in step 1')
    (1.0, 'stepped', 'in step 1')
    (None, 'not known', 'its oldest events are gone, and what else they told')
    """
    found = [*_in_order((*_beginning(traces), *_middle(traces), *_training(traces), *_end(traces)))]
    if not is_whole(traces):
        gone = "its oldest events are gone, and what else they told"
        found.append(LifeEntry(what="not known", text=gone))
    return tuple(
        each if each.at_ms is None else replace(each, age_s=max(0, now_ms - each.at_ms) / 1_000)
        for each in found
    )


def is_whole(traces: Traces) -> bool:
    """Whether no event of the trajectory is gone: the first of them is there."""
    return any(isinstance(event, GroupOpened) for _, event in traces.events)


def _in_order(life: Iterable[LifeEntry]) -> list[LifeEntry]:
    """By time; what has none has that of the one before it."""
    ranked: list[tuple[int, LifeEntry]] = []
    for each in life:
        before = ranked[-1][0] if ranked else 0
        ranked.append((before if each.at_ms is None else each.at_ms, each))
    return [each for _, each in sorted(ranked, key=lambda pair: pair[0])]


def _at(what: str, text: str, at_ms: int | None) -> LifeEntry:
    """An entry that must have happened: where nobody knows when, it says so."""
    if at_ms is not None:
        return LifeEntry(what=what, text=text, at_ms=at_ms)
    return LifeEntry(what=what, text=f"{text}; {_UNKNOWN}" if text else _UNKNOWN)


def _beginning(traces: Traces) -> Iterator[LifeEntry]:
    """Up to the last writer."""
    yield _at("group opened", "", traces.opened_ms)
    for event_id, event in traces.events:
        if isinstance(event, RefillGranted) and event.key == traces.key:
            text = f"refill {event.number} of its group"
            yield LifeEntry(what="attempt granted", text=text, at_ms=entry_ms(event_id))
            break
    epoch = traces.lease_epoch or 1
    if epoch > 1:
        often = "once" if epoch == 2 else f"{epoch - 1} times"
        by = f", last by {traces.writer}" if traces.writer else ""
        yield LifeEntry(what="taken over", text=f"{often}{by}; {_NOT_NOTED}")


def _middle(traces: Traces) -> Iterator[LifeEntry]:
    """Seal, reward and what else events tell; one that stands twice in the stream counts once."""
    told: dict[tuple[str, str], LifeEntry] = {}
    for event_id, event in traces.events:
        for what, text in _words_of(event, traces.key):
            entry = LifeEntry(what=what, text=text, at_ms=entry_ms(event_id))
            told.setdefault((what, text), entry)
    whats = {what for what, _ in told}
    if traces.state in _WERE_SEALED and "sealed" not in whats:
        yield _at("sealed", "", None)
    yield from told.values()
    is_posted = traces.posted not in ("", _MISSED) and not traces.posted.startswith(_LATE)
    if is_posted and "reward posted" not in whats:
        yield _at("reward posted", "", None)


def _words_of(event: Event, key: TrajectoryKey) -> Iterator[tuple[str, str]]:
    """What an event is called here, and what it says."""
    match event:
        case SealedTrajectory(awaits_reward=True):
            yield "sealed", f"{event.status.value}, its reward comes later"
        case SealedTrajectory():
            reward = "" if event.reward is None else f", reward {event.reward:g}"
            yield "sealed", f"{event.status.value}{reward}"
        case RewardPosted():
            named = [f"{name} {value:g}" for name, value in event.reward_components.items()]
            whole = [] if event.reward is None else [f"{event.reward:g}"]
            yield "reward posted", ", ".join([*whole, *named])
        case DeadlineFired(awaited=None):
            yield "deadline fired", f"of its group, after {event.num_refills} refills"
        case DeadlineFired():
            yield "deadline fired", "of its reward"
        case RefillGranted() if event.key.attempt > key.attempt:
            yield "tried again", f"attempt {event.key.attempt} of its sample was granted"
        case TrajectoryAbandoned():
            yield "abandoned", event.reason
        case TrajectoryDied():
            yield "dead", event.reason
        case _:
            pass


def _training(traces: Traces) -> Iterator[LifeEntry]:
    """From the plan on."""
    step, frontier, times = traces.step, traces.frontier, traces.times
    if step is None:
        return
    where = f"in step {step}"
    planned_ms = times.get(f"planned:{step}")
    yield _at("planned", where, planned_ms)
    for at_ms, back_to in _rollbacks(traces):
        if planned_ms is not None and planned_ms <= at_ms:
            text = f"the trainer went back behind step {back_to}"
            yield LifeEntry(what="undone", text=text, at_ms=at_ms)
    if step <= frontier.stepped:
        yield _at("stepped", where, times.get(f"stepped:{step}"))
    if step <= frontier.committed:
        checkpoints = [int(n.partition(":")[2]) for n in times if n.startswith("committed:")]
        # Of a step that is no longer in `times`, the checkpoint may be gone from it too.
        has_its_own = planned_ms is not None
        by = min((m for m in checkpoints if has_its_own and m >= step), default=0)
        text = f"by the checkpoint of step {by}" if by else ""
        yield _at("committed", text, times.get(f"committed:{by}"))


def _rollbacks(traces: Traces) -> list[tuple[int, int]]:
    """(when, the step before it) of those that undid the step, the first one first."""
    events = [(entry_ms(i), e.step) for i, e in traces.events if isinstance(e, RolledBack)]
    step = traces.step or 0
    return [
        (at_ms, back_to)
        for (at_ms, back_to), noted in reversed(
            [*zip(reversed(events), traces.frontier.rollbacks, strict=False)]
        )
        if noted.step == back_to < step <= noted.stepped
    ]


def _end(traces: Traces) -> Iterator[LifeEntry]:
    """What ended it untrained, where no event says so, and what became of it then."""
    told = _TOLD_BY_EVENTS.get(traces.state)
    is_told = any(
        what == told for _, event in traces.events for what, _ in _words_of(event, traces.key)
    )
    if told and not is_told:
        yield _at(told, traces.reason, traces.died_ms)
    elif traces.state in STATES_WITH_REASON and not told:
        yield LifeEntry(what=traces.state.value, text=f"{traces.reason}; {_NOT_NOTED}")
    if traces.posted.startswith(_LATE):
        text = "its group was decided before: it changed nothing"
        yield LifeEntry(what="late reward", text=f"{text}; {_NOT_NOTED}")
