"""The ledger of a run by state: numbers, reasons and bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Final

import redis

from turnstream.store.client import keys
from turnstream.store.client.stored_values import parsed_number, reading
from turnstream.store.run.tasks import PromptCounts, read_prompt_counts
from turnstream.types import TrajectoryState
from turnstream_server.bus.core.frontier import Frontier, read_frontier
from turnstream_server.bus.core.scan import hash_fields
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """The trajectories of one state.

    Attributes:
        reasons: all reasons with their numbers, the most frequent first.
        held_bytes: their bytes in the store, reserved or stored.
    """

    state: TrajectoryState
    count: int
    reasons: tuple[tuple[str, int], ...]
    held_bytes: int


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
    """Return the ledger of a run by state.

    Raises:
        CorruptRecordError: a field is damaged; names its key.
    """
    frontier = read_frontier(client, run)
    reasons, held_bytes = _read_entries(client, run, frontier)
    counts = read_ledger(client, run)
    return LedgerStates(
        run=run,
        frontier=frontier,
        counts=counts,
        states=tuple(
            StateFacts(
                state=state,
                count=count,
                reasons=tuple(sorted(reasons[state].items(), key=lambda each: (-each[1], each[0]))),
                held_bytes=held_bytes[state],
            )
            for state, count in counts.by_state.items()
            if count
        ),
        prompts=read_prompt_counts(client, run),
        budget=read_budget(client, run),
    )


def _read_entries(
    client: redis.Redis, run: str, frontier: Frontier
) -> tuple[defaultdict[TrajectoryState, Counter[str]], Counter[TrajectoryState]]:
    """Return the reasons and the bytes of each state, compact records included."""
    names = keys.run_keys(run)
    reasons: defaultdict[TrajectoryState, Counter[str]] = defaultdict(Counter)
    held_bytes: Counter[TrajectoryState] = Counter()
    held = {name: _held(names.held, name, value) for name, value in hash_fields(client, names.held)}
    for trajectory_id, value in hash_fields(client, names.ledger):
        with reading(names.ledger, trajectory_id):
            state, rest = parse_entry(value, frontier)
        held_bytes[state] += held.get(trajectory_id, 0)
        if state in STATES_WITH_REASON:
            reasons[state][rest] += 1
    for end, number in past_reasons(client, run):
        name, _, reason = end.partition(":")
        with reading(names.reasons, end):
            state = TrajectoryState(name)
        reasons[state][reason] += number
    return reasons, held_bytes


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
