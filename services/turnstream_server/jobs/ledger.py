"""The ledger of a run, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from turnstream.store.client import keys
from turnstream.store.run.configs import open_run
from turnstream_server.bus.core.scan import server_ms
from turnstream_server.bus.queries.states import TOP_REASONS, LedgerStates, read_states
from turnstream_server.bus.queries.trajectory_history import TrajectoryHistory, read_history
from turnstream_server.jobs.store_client import store_client


def print_ledger(url: str, run: str, console: Console) -> None:
    """Print each state that occurs: number of trajectories, bytes and main reasons."""
    seen = _read_states(url, run)
    table = Table("state", "trajectories", "bytes held", "reasons", title=f"ledger of {run}")
    for facts in seen.states:
        table.add_row(
            facts.state,
            f"{facts.count:,}",
            f"{facts.held_bytes:,}" if facts.held_bytes else "",
            _reasons(facts.reasons),
        )
    table.add_section()
    budget = seen.budget
    table.add_row("accepted", f"{seen.counts.accepted:,}", f"{budget.held.total:,}", "")
    origin = seen.frontier.origin
    if origin is not None:
        where = f"by {origin.run}, up to step {origin.step}"
        table.add_row("of these", f"{origin.num_trajectories:,}", "", where)
    console.print(table)
    if seen.counts.num_conflicts:
        number = seen.counts.num_conflicts
        last = keys.readable_name(seen.counts.last_conflict)
        console.print(f"{number:,} writes with another content were refused, the last: {last}")
    if seen.counts.num_late_rewards:
        number = seen.counts.num_late_rewards
        console.print(f"{number:,} rewards came after their groups were decided")
    if seen.prompts.num_added:
        console.print(f"prompts: {seen.prompts.sentence}")
    console.print(f"budget of the run: {_limit(budget.max_bytes)}")
    server = f"{budget.server_used:,} bytes of {_limit(budget.server_max)}"
    console.print(f"memory of the server: {server}")
    if why_full := budget.bytes.why_full(is_urgent=False):
        console.print(why_full, highlight=False, soft_wrap=True)


def ledger_json(url: str, run: str) -> str:
    """Return the same as JSON."""
    seen = _read_states(url, run)
    content: dict[str, Any] = {
        "run": run,
        "accepted": seen.counts.accepted,
        "conflicts": seen.counts.num_conflicts,
        "last_conflict": seen.counts.last_conflict,
        "late_rewards": seen.counts.num_late_rewards,
        "planned": seen.frontier.planned,
        "stepped": seen.frontier.stepped,
        "committed": seen.frontier.committed,
        "lineage": seen.frontier.lineage,
        "rollbacks": [each._asdict() for each in seen.frontier.rollbacks],
        "origin": None if seen.frontier.origin is None else asdict(seen.frontier.origin),
        "states": {
            facts.state.value: {
                "count": facts.count,
                "reasons": dict(facts.reasons),
                "held_bytes": facts.held_bytes,
            }
            for facts in seen.states
        },
        "prompts": {
            "added": seen.prompts.num_added,
            "left": seen.prompts.num_left,
            "given": seen.prompts.num_given,
            "trained": seen.prompts.num_trained,
            "filtered": seen.prompts.num_filtered,
        },
        "budget": asdict(seen.budget),
        "full": seen.budget.bytes.why_full(is_urgent=False),
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
    title = f"{run}: {keys.readable_name(history.trajectory_id)}"
    table = Table("what", "when", "details", title=title)
    for event in history.events:
        table.add_row(event.name, _when(event.at_ms, now_ms), event.details)
    if not history.is_whole:
        table.add_row("", "", "older events are no longer stored")
    table.add_section()
    for what, text in _history_lines(history):
        table.add_row(what, "", text)
    console.print(table)


def history_json(url: str, run: str, name: str, *, folder: Path | None = None) -> str:
    """Return the history of one trajectory as JSON."""
    with store_client(url) as client:
        run = open_run(client, run)
        history = read_history(client, run, name, folder=folder)
        return json.dumps(asdict(history), indent=2)


def _history_lines(history: TrajectoryHistory) -> list[tuple[str, str]]:
    """Return (fact, details) of its present state."""
    lines: list[tuple[str, str]] = []
    if history.reward is not None:
        lines.append(("reward", f"{history.reward:g}"))
    if history.step is not None:
        lines.append(("batch", f"step {history.step}"))
    if history.advantage is not None:
        lines.append(("advantage", f"{history.advantage:g}"))
    lines.append(("state", history.state + (f": {history.reason}" if history.reason else "")))
    return lines


def _read_states(url: str, run: str) -> LedgerStates:
    with store_client(url) as client:
        run = open_run(client, run)
        seen = read_states(client, run)
    seen.counts.check()
    return seen


def _reasons(reasons: Sequence[tuple[str, int]]) -> str:
    """The most frequent reasons, a line each, and how many others there are.

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
    """A bound, or that there is none.

    >>> _limit(20_000), _limit(0)
    ('20,000 bytes', 'no limit')
    """
    return f"{num_bytes:,} bytes" if num_bytes else "no limit"


def _when(at_ms: int, now_ms: int) -> str:
    """Return a time and its age as text.

    >>> _when(1_700_000_000_000, 1_700_000_061_000)
    '2023-11-14 22:13:20+00:00, 1 min 1 s ago'
    """
    time = datetime.fromtimestamp(at_ms / 1_000, UTC)
    age_s = max(0, now_ms - at_ms) / 1_000
    return f"{time.isoformat(sep=' ', timespec='seconds')}, {duration(age_s)} ago"


def duration(seconds: float | None) -> str:
    """A time span in its two largest units.

    >>> duration(4000.0), duration(12.3), duration(None)
    ('1 h 6 min', '12 s', '')
    """
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    days, rest_h = divmod(hours, 24)
    if days:
        return f"{days} d {rest_h} h"
    return f"{hours} h {rest_min} min" if hours else f"{minutes} min {rest_s} s"
