"""The ledger of a run, state by state: how many, how old, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import redis

from turnstream.store import keys
from turnstream.store.tasks import PromptCounts, read_prompt_counts
from turnstream.types import GroupOpened, TrajectoryState
from turnstream_server.bus.budget import ByteBudget, parse_held, read_budget
from turnstream_server.bus.frontier import Frontier, read_frontier
from turnstream_server.bus.ledger import LedgerCounts, read_ledger
from turnstream_server.bus.pages import entry_ms, hash_fields, readable_events, server_ms
from turnstream_server.bus.past import past_reasons

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
        count: how many there are, also those of which only the number is kept.
        oldest_age_s: seconds since the group of the oldest one was opened; None where the ledger
            holds none of them one by one, or no event tells.
        reasons: the most frequent ones with their numbers, at most TOP_REASONS.
        held_bytes: that they hold in the store, reserved or stored.
    """

    state: TrajectoryState
    count: int
    oldest_age_s: float | None
    reasons: tuple[tuple[str, int], ...]
    held_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStates:
    """A run's ledger by state; its parts are read one after the other.

    Attributes:
        counts: the numbers, as of one moment.
        states: those that occur, in the order of a trajectory's life.
        prompts: where those are that the run was given.
        budget: what they hold, and may hold. More than the states say is held for samples that are
            not begun.
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
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    names = keys.run_keys(run)
    frontier = read_frontier(client, run)
    opened_ms = _opened_ms(client, run)
    oldest_ms: dict[TrajectoryState, int] = {}
    reasons: dict[TrajectoryState, Counter[str]] = defaultdict(Counter)
    held = {name: parse_held(value)[1] for name, value in hash_fields(client, names.held)}
    held_bytes: Counter[TrajectoryState] = Counter()
    for trajectory_id, value in hash_fields(client, names.ledger):
        state, rest = parse_entry(value, frontier)
        held_bytes[state] += held.get(trajectory_id, 0)
        born_ms = opened_ms.get(trajectory_id.partition("/")[0])
        if born_ms is not None:
            oldest_ms[state] = min(born_ms, oldest_ms.get(state, born_ms))
        if state in STATES_WITH_REASON:
            reasons[state][rest] += 1
    for end, number in past_reasons(client, run):
        name, _, reason = end.partition(":")
        reasons[TrajectoryState(name)][reason] += number
    counts = read_ledger(client, run)
    now_ms = server_ms(client)
    return LedgerStates(
        run=run,
        frontier=frontier,
        counts=counts,
        states=tuple(
            StateFacts(
                state=state,
                count=count,
                oldest_age_s=_age_s(oldest_ms.get(state), now_ms),
                reasons=_most_frequent(reasons[state].items()),
                held_bytes=held_bytes[state],
            )
            for state, count in counts.by_state.items()
            if count
        ),
        prompts=read_prompt_counts(client, run),
        budget=read_budget(client, run),
    )


def parse_entry(value: bytes, frontier: Frontier) -> tuple[TrajectoryState, str]:
    """State of a ledger entry, and what else it says: epoch and writer, step, or reason."""
    name, _, rest = value.decode().partition(":")
    state = TrajectoryState(name)
    if state is TrajectoryState.PLANNED:
        state = state_of_step(int(rest), frontier)
    return state, rest


def state_of_step(step: int, frontier: Frontier) -> TrajectoryState:
    """Where the trajectories of a planned batch are: that follows from the frontier."""
    if step <= frontier.committed:
        return TrajectoryState.COMMITTED
    return TrajectoryState.STEPPED if step <= frontier.stepped else TrajectoryState.PLANNED


def _opened_ms(client: redis.Redis, run: str) -> dict[str, int]:
    """When each group was opened, by its encoded name, as far as events are kept."""
    opened: dict[str, int] = {}
    for entry_id, event in readable_events(client, keys.run_keys(run).events):
        if isinstance(event, GroupOpened):
            opened.setdefault(keys.encode_name(event.group_id), entry_ms(entry_id))
    return opened


def _age_s(born_ms: int | None, now_ms: int) -> float | None:
    return None if born_ms is None else max(0, now_ms - born_ms) / 1_000


def _most_frequent(numbers: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(numbers, key=lambda pair: (-pair[1], pair[0]))[:TOP_REASONS])
