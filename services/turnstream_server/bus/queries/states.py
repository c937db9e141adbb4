"""The ledger of a run, state by state: how many, how old, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final

import redis

from turnstream.store.client import keys
from turnstream.store.client.stored_values import parsed_number, reading
from turnstream.store.run.tasks import PromptCounts, read_prompt_counts
from turnstream.types import TrajectoryState
from turnstream_server.bus.core.frontier import Frontier, read_frontier
from turnstream_server.bus.core.group_open_times import Openings, read_openings
from turnstream_server.bus.core.scan import hash_fields, server_ms
from turnstream_server.bus.queries.budget import ByteBudget, parse_held, read_budget
from turnstream_server.bus.queries.ledger import LedgerCounts, read_ledger
from turnstream_server.bus.release.compact_records import past_reasons

TOP_REASONS: Final = 5

STATES_WITH_REASON: Final = frozenset(
    {
        *(TrajectoryState.FILTERED, TrajectoryState.EXPIRED, TrajectoryState.SURPLUS),
        *(TrajectoryState.INCOMPLETE, TrajectoryState.ABANDONED, TrajectoryState.DEAD),
        TrajectoryState.EVALUATED,
    }
)
"""Ends of a trajectory that is not trained; the ledger says why."""

_MAY_BE_COMPACT: Final = STATES_WITH_REASON | {TrajectoryState.COMMITTED}
"""States whose trajectories may be compact, so that their age is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """The trajectories of one state.

    Attributes:
        count: their number, compact ones included.
        oldest_age_s: seconds since the group of the oldest one was opened; None if unknown.
        may_be_older: whether some ages are unknown, because their events are gone or they are
            compact: `oldest_age_s` is a lower limit.
        reasons: all reasons with their numbers, the most frequent first.
        held_bytes: their bytes in the store, reserved or stored.
    """

    state: TrajectoryState
    count: int
    oldest_age_s: float | None
    reasons: tuple[tuple[str, int], ...]
    held_bytes: int = 0
    may_be_older: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStates:
    """A run's ledger by state; its parts are read one after the other.

    Attributes:
        counts: the numbers at one time.
        states: the states that occur, in their order in time.
        prompts: counts of the run's prompts.
        budget: bytes and limits; samples without a trajectory have reservations, too.
    """

    run: str
    frontier: Frontier
    counts: LedgerCounts
    states: tuple[StateFacts, ...]
    prompts: PromptCounts
    budget: ByteBudget


def read_states(client: redis.Redis, run: str) -> LedgerStates:
    """The ledger of a run, state by state.

    Raises:
        CorruptRecordError: a field is damaged; names its key.
    """
    frontier = read_frontier(client, run)
    tallies = _tally(client, run, frontier)
    openings = read_openings(client, run)  # after the ledger: whoever is in it was opened by then
    counts = read_ledger(client, run)
    now_ms = server_ms(client)
    return LedgerStates(
        run=run,
        frontier=frontier,
        counts=counts,
        states=tuple(
            tallies[state].facts(state, count, openings, now_ms)
            for state, count in counts.by_state.items()
            if count
        ),
        prompts=read_prompt_counts(client, run),
        budget=read_budget(client, run),
    )


@dataclass(slots=True)
class _Tally:
    """The trajectories of one state, while the ledger is read."""

    num_listed: int = 0
    groups: set[str] = field(default_factory=set[str])  # encoded names
    reasons: Counter[str] = field(default_factory=Counter[str])
    held_bytes: int = 0

    def facts(
        self, state: TrajectoryState, count: int, openings: Openings, now_ms: int
    ) -> StateFacts:
        oldest_ms, may_be_older = openings.oldest_ms(self.groups)
        is_partly_compact = state in _MAY_BE_COMPACT and self.num_listed < count
        return StateFacts(
            state=state,
            count=count,
            oldest_age_s=None if oldest_ms is None else max(0, now_ms - oldest_ms) / 1_000,
            may_be_older=oldest_ms is not None and (may_be_older or is_partly_compact),
            reasons=tuple(sorted(self.reasons.items(), key=lambda pair: (-pair[1], pair[0]))),
            held_bytes=self.held_bytes,
        )


def _tally(
    client: redis.Redis, run: str, frontier: Frontier
) -> defaultdict[TrajectoryState, _Tally]:
    """Return the numbers by state, and by reason, compact records included."""
    names = keys.run_keys(run)
    held = {name: _held(names.held, name, value) for name, value in hash_fields(client, names.held)}
    tallies: defaultdict[TrajectoryState, _Tally] = defaultdict(_Tally)
    for trajectory_id, value in hash_fields(client, names.ledger):
        with reading(names.ledger, trajectory_id):
            state, rest = parse_entry(value, frontier)
        tally = tallies[state]
        tally.num_listed += 1
        tally.groups.add(trajectory_id.partition("/")[0])
        tally.held_bytes += held.get(trajectory_id, 0)
        if state in STATES_WITH_REASON:
            tally.reasons[rest] += 1
    for end, number in past_reasons(client, run):
        name, _, reason = end.partition(":")
        with reading(names.reasons, end):
            state = TrajectoryState(name)
        tallies[state].reasons[reason] += number
    return tallies


def _held(key: str, name: str, value: bytes) -> int:
    with reading(key, name):
        return parse_held(value)[1]


def parse_entry(value: bytes, frontier: Frontier) -> tuple[TrajectoryState, str]:
    """Return the state of a ledger entry, and its epoch and writer, step, or reason.

    Raises:
        ValueError: the entry is damaged.
    """
    name, _, rest = value.decode().partition(":")
    state = TrajectoryState(name)
    if state is TrajectoryState.PLANNED:
        state = state_of_step(parsed_number(rest.encode()), frontier)
    return state, rest


def state_of_step(step: int, frontier: Frontier) -> TrajectoryState:
    """Return the state of the trajectories of a planned batch, which follows from the frontier."""
    if step <= frontier.committed:
        return TrajectoryState.COMMITTED
    return TrajectoryState.STEPPED if step <= frontier.stepped else TrajectoryState.PLANNED
