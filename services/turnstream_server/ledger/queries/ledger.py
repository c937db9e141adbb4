"""The ledger of a run: exact counts, reasons and bytes of each state, and the byte budget."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import redis

from turnstream.errors import TurnstreamError
from turnstream.store.client import keys
from turnstream.store.client.fullness import Bytes, parse_bytes
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Command
from turnstream.store.client.stored_values import StoredHash, damaged, parsed_number, reading
from turnstream.store.run.configs import read_config
from turnstream.store.run.runs import newest_version
from turnstream.store.run.tasks import read_prompt_counts
from turnstream.types import TrajectoryState, VersionAnnounced
from turnstream_server.ledger.core.frontier import Frontier, read_frontier
from turnstream_server.ledger.core.scan import RunScript, hash_fields
from turnstream_server.ledger.release.compact_records import past_reasons
from turnstream_server.ledger.release.release_writes import counted_reason

TOP_REASONS: Final = 5

STATES_WITH_REASON: Final = frozenset(
    {
        *(TrajectoryState.FILTERED, TrajectoryState.EXPIRED, TrajectoryState.SURPLUS),
        *(TrajectoryState.INCOMPLETE, TrajectoryState.ABANDONED, TrajectoryState.DEAD),
        TrajectoryState.EVALUATED,
    }
)
"""Ends of a trajectory that is not trained; the ledger says why."""

_READ = RunScript("read_ledger", "queries", "frontier batches counts conflicts")
_FOLLOW_FROM_THE_FRONTIER = (
    TrajectoryState.PLANNED,
    TrajectoryState.STEPPED,
    TrajectoryState.COMMITTED,
)
_COUNTS = (*TrajectoryState, "accepted", "late_rewards")


class LedgerMismatchError(TurnstreamError):
    """The states of a run do not add up: a defect, or a store that was edited by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Trajectories of a run by state in one snapshot; every state is a key.

    Attributes:
        accepted: trajectories ever opened.
        num_in_batches: trajectories in manifests: planned, stepped and committed ones.
        num_late_rewards: rewards without effect, posted after the group was decided.
        num_conflicts: writes that were refused because their key has another content.
        last_conflict: the last of them, "<trajectory id>: <why>"; empty if there was none.
    """

    accepted: int
    by_state: Mapping[TrajectoryState, int]
    num_in_batches: int
    num_late_rewards: int = 0
    num_conflicts: int = 0
    last_conflict: str = ""

    @property
    def num_trained(self) -> int:
        """Number of trajectories in stepped batches."""
        return self.by_state[TrajectoryState.STEPPED] + self.by_state[TrajectoryState.COMMITTED]

    def check(self) -> None:
        """Check that every accepted trajectory is in exactly one state."""
        total = sum(self.by_state.values())
        in_batches = sum(self.by_state[state] for state in _FOLLOW_FROM_THE_FRONTIER)
        if (
            total != self.accepted
            or in_batches != self.num_in_batches
            or min(self.by_state.values()) < 0
        ):
            shown = ", ".join(f"{state} {number}" for state, number in self.by_state.items())
            raise LedgerMismatchError(
                f"accepted {self.accepted}, in batches {self.num_in_batches}, but {shown}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Summary of a run for one screen; `planner` is the batcher that plans it, "" for none."""

    run: str
    frontier: Frontier
    ledger: LedgerCounts
    newest_version: VersionAnnounced | None
    planner: str


def read_ledger(client: redis.Redis, run: str) -> LedgerCounts:
    """Return the counts of a run in one round trip."""
    names = keys.run_keys(run)
    where = (names.frontier, names.batches, names.counts, names.conflicts)
    with reading(" or ".join(where)):
        reply = _READ.call(client, run)
    return parse_ledger(run, reply)


def ledger_command(run: str) -> Command:
    """Return the call whose reply `parse_ledger` takes."""
    return _READ(run)


def run_summary(client: redis.Redis, run: str) -> RunSummary:
    """Return the summary of a run; its parts are read one after the other."""
    read_config(client, run)  # refuses the format of another release
    owner: Any = client.hget(keys.run_keys(run).leader, "owner")
    return RunSummary(
        run=run,
        frontier=read_frontier(client, run),
        ledger=read_ledger(client, run),
        newest_version=newest_version(client, run),
        planner=(owner or b"").decode(),
    )


def parse_ledger(run: str, reply: list[Any]) -> LedgerCounts:
    """Return the counts in the reply of `ledger_command`."""
    names = keys.run_keys(run)
    until_stepped, until_committed, until_planned, flat, (num_conflicts, last_conflict) = reply
    if None in (until_stepped, until_committed, until_planned):
        raise damaged(names.batches, "", "the entry of a step is no number of trajectories")
    stored = StoredHash(names.counts, dict(zip(flat[::2], flat[1::2], strict=True)))
    counts = {name: stored.number(name) for name in _COUNTS}
    conflicts = StoredHash(
        names.conflicts, {b"num": num_conflicts or b"0", b"last": last_conflict or b""}
    )
    by_state = {state: counts[state] for state in TrajectoryState}
    # The count of "planned" holds every trajectory that was ever planned.
    by_state[TrajectoryState.PLANNED] = counts["planned"] - until_stepped
    by_state[TrajectoryState.STEPPED] = until_stepped - until_committed
    by_state[TrajectoryState.COMMITTED] = until_committed
    return LedgerCounts(
        accepted=counts["accepted"],
        by_state=by_state,
        num_in_batches=until_planned,
        num_late_rewards=counts["late_rewards"],
        num_conflicts=conflicts.needed("num", parsed_number),
        last_conflict=conflicts.needed("last", bytes.decode),
    )


def ledger_facts(client: redis.Redis, run: str) -> dict[str, Any]:
    """Return the states of a run's trajectories in plain values, with counts, reasons and bytes.

    The parts are read one after the other.

    Raises:
        LedgerMismatchError: the states do not add up.
        CorruptRecordError: a field is damaged; names its key.
    """
    frontier = read_frontier(client, run)
    reasons, held_bytes = _read_entries(client, run, frontier)
    counts = read_ledger(client, run)
    counts.check()
    prompts = read_prompt_counts(client, run)
    budget = read_budget(client, run)
    return {
        "run": run,
        "accepted": counts.accepted,
        "conflicts": counts.num_conflicts,
        "last_conflict": counts.last_conflict,
        "late_rewards": counts.num_late_rewards,
        **{name: getattr(frontier, name) for name in ("planned", "stepped", "committed")},
        "lineage": frontier.lineage,
        "rollbacks": [each._asdict() for each in frontier.rollbacks],
        "origin": None if frontier.origin is None else asdict(frontier.origin),
        "states": {
            state.value: {
                "count": count,
                "reasons": dict(
                    sorted(reasons[state].items(), key=lambda each: (-each[1], each[0]))
                ),
                "held_bytes": held_bytes[state],
            }
            for state, count in counts.by_state.items()
            if count
        },
        "prompts": {
            name: getattr(prompts, f"num_{name}")
            for name in ("added", "left", "given", "trained", "filtered")
        },
        "budget": budget._asdict(),
        "full": budget.why_full,
    }


def _read_entries(
    client: redis.Redis, run: str, frontier: Frontier
) -> tuple[defaultdict[TrajectoryState, Counter[str]], Counter[TrajectoryState]]:
    """Return the reasons and the bytes of each state, compact records included."""
    names = keys.run_keys(run)
    reasons: defaultdict[TrajectoryState, Counter[str]] = defaultdict(Counter)
    held_bytes: Counter[TrajectoryState] = Counter()
    held = {
        name: _held(names.payload_bytes, name, value)
        for name, value in hash_fields(client, names.payload_bytes)
    }
    for trajectory_id, value in hash_fields(client, names.ledger):
        with reading(names.ledger, trajectory_id):
            state, rest = parse_entry(value, frontier)
        held_bytes[state] += held.get(trajectory_id, 0)
        if state in STATES_WITH_REASON:
            reasons[state][counted_reason(state, rest)] += 1
    for end, number in past_reasons(client, run):
        name, _, reason = end.partition(":")
        with reading(names.reasons, end):
            state = TrajectoryState(name)
        reasons[state][reason] += number
    return reasons, held_bytes


def _held(key: str, name: str, value: bytes) -> int:
    with reading(key, name):
        return parsed_number(value.removeprefix(b"r"))  # r: reserved


def read_budget(client: redis.Redis, run: str) -> Bytes:
    """Return the bytes of a run and their limits; the parts are read one after the other."""
    _, config = read_config(client, run)
    name = keys.run_keys(run).budget
    with reading(name), translating():
        fields: Any = client.execute_command("HGETALL", name)
        memory: Any = client.info("memory")
    return parse_bytes(
        StoredHash(name, fields),
        used=int(memory.get("used_memory", 0)),
        allowed=int(memory.get("maxmemory", 0)),
        max_bytes=config.max_bytes,
    )


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
