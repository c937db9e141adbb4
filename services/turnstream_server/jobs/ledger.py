"""The ledger of a run, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from turnstream.store.client import keys
from turnstream.store.run.configs import open_run
from turnstream_server.bus.core.scan import server_ms
from turnstream_server.bus.queries.ledger import TOP_REASONS, LedgerStates, read_states
from turnstream_server.bus.queries.trajectory_history import read_history
from turnstream_server.jobs.screen import make_table, shown
from turnstream_server.jobs.store_client import store_client


def print_ledger(url: str, run: str, console: Console) -> None:
    """Print each state that occurs: number of trajectories, bytes and main reasons."""
    seen = _read_states(url, run)
    rows = [
        (facts.state.value, facts.count, facts.held_bytes or None, _reasons(facts.reasons))
        for facts in seen.states
    ]
    table = make_table(
        ("state", "trajectories", "bytes held", "reasons"), rows, title=f"ledger of {run}"
    )
    table.add_section()
    counts, budget, origin = seen.counts, seen.budget, seen.frontier.origin
    table.add_row("accepted", shown(counts.accepted), shown(budget.held))
    if origin is not None:
        where = f"by {origin.run}, up to step {origin.step}"
        table.add_row("of these", shown(origin.num_trajectories), "", where)
    console.print(table)
    if counts.num_conflicts:
        last = keys.readable_name(counts.last_conflict)
        refused = f"{counts.num_conflicts:,} writes with another content were refused"
        console.print(f"{refused}, the last: {last}")
    if counts.num_late_rewards:
        console.print(f"{counts.num_late_rewards:,} rewards came after their groups were decided")
    if seen.prompts.num_added:
        console.print(f"prompts: {seen.prompts.sentence}")
    console.print(f"budget of the run: {_limit(budget.max_bytes)}")
    console.print(f"memory of the server: {budget.used:,} bytes of {_limit(budget.allowed)}")
    if why_full := budget.why_full(is_urgent=False):
        console.print(why_full, highlight=False, soft_wrap=True)


def ledger_json(url: str, run: str) -> str:
    """Return the same as JSON."""
    seen = _read_states(url, run)
    counts, frontier = seen.counts, seen.frontier
    content: dict[str, Any] = {
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
            facts.state.value: {
                "count": facts.count,
                "reasons": dict(facts.reasons),
                "held_bytes": facts.held_bytes,
            }
            for facts in seen.states
        },
        "prompts": {
            name: getattr(seen.prompts, f"num_{name}")
            for name in ("added", "left", "given", "trained", "filtered")
        },
        "budget": seen.budget._asdict(),
        "full": seen.budget.why_full(is_urgent=False),
    }
    return json.dumps(content, indent=2)


def print_history(
    url: str, run: str, name: str, console: Console, *, folder: Path | None = None
) -> None:
    """Print the events of one trajectory, then its state."""
    with store_client(url) as client:
        run = open_run(client, run)
        history = read_history(client, run, name, folder=folder)
        now_ms = server_ms(client)
    rows = [(event.name, _when(event.at_ms, now_ms), event.details) for event in history.events]
    title = f"{run}: {keys.readable_name(history.trajectory_id)}"
    table = make_table(("what", "when", "details"), rows, title=title)
    if not history.is_whole:
        table.add_row("", "", "older events are no longer stored")
    table.add_section()
    step = None if history.step is None else f"step {history.step}"
    state = history.state + (f": {history.reason}" if history.reason else "")
    for what, value in (
        ("reward", history.reward),
        ("batch", step),
        ("advantage", history.advantage),
        ("state", state),
    ):
        if value is not None:
            table.add_row(what, "", shown(value))
    console.print(table)


def history_json(url: str, run: str, name: str, *, folder: Path | None = None) -> str:
    """Return the history of one trajectory as JSON."""
    with store_client(url) as client:
        run = open_run(client, run)
        history = read_history(client, run, name, folder=folder)
        return json.dumps(asdict(history), indent=2)


def _read_states(url: str, run: str) -> LedgerStates:
    with store_client(url) as client:
        run = open_run(client, run)
        seen = read_states(client, run)
    seen.counts.check()
    return seen


def _reasons(reasons: Sequence[tuple[str, int]]) -> str:
    """Return the most frequent reasons, a line each, and the number of the others.

    >>> print(_reasons([("no time", 9), *((f"reason {n}", 1) for n in range(5))]))
    9 x no time
    1 x reason 0
    1 x reason 1
    1 x reason 2
    1 x reason 3
    and 1 others, of 1 trajectories
    """
    lines = [f"{count:,} x {reason}" for reason, count in reasons[:TOP_REASONS]]
    others = [count for _, count in reasons[TOP_REASONS:]]
    if others:
        lines.append(f"and {len(others):,} others, of {sum(others):,} trajectories")
    return "\n".join(lines)


def _limit(num_bytes: int) -> str:
    """Return a limit as text; 0 is none."""
    return f"{num_bytes:,} bytes" if num_bytes else "no limit"


def _when(at_ms: int, now_ms: int) -> str:
    """Return a time and its age as text.

    >>> _when(1_700_000_000_000, 1_700_000_061_000)
    '2023-11-14 22:13:20+00:00, 1 min 1 s ago'
    """
    time = datetime.fromtimestamp(at_ms / 1_000, UTC)
    age_s = max(0, now_ms - at_ms) / 1_000
    return f"{time.isoformat(sep=' ', timespec='seconds')}, {duration(age_s)} ago"


def duration(seconds: float) -> str:
    """Return a time span in its two largest units.

    >>> duration(4000.0), duration(12.3)
    ('1 h 6 min', '12 s')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, rest_min = divmod(minutes, 60)
    return f"{hours} h {rest_min} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"
