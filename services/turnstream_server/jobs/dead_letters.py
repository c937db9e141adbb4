"""The dead letters of a run, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import redis
from rich.console import Console
from rich.table import Table

from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.configs import open_run
from turnstream_server.bus.admin.dead_letters import (
    DeadContent,
    DeadLetters,
    DeadTurn,
    RejectedEvent,
    discard_event,
    discard_trajectory,
    find_trajectory,
    open_event,
    open_trajectory,
    read_dead_letters,
)

_YEAR_10000_MS: Final = 253_402_300_800_000


def print_dead_letters(url: str, run: str, console: Console) -> None:
    """Print the dead letters of a run: reason, time, size, and the state of the group."""
    found = _read(url, run)
    table = Table(
        *("dead letter", "since", "bytes", "its group", "reason"),
        title=f"dead letters of {found.run}",
    )
    for dead in found.trajectories:
        table.add_row(
            keys.readable_name(dead.trajectory_id),
            _time(dead.since_ms),
            f"{dead.num_bytes:,}",
            dead.group_state,
            dead.reason,
        )
    for event in found.events:
        size = f"{len(event.record):,}"
        table.add_row(f"event {event.event_id}", _time(event.since_ms), size, "", event.reason)
    console.print(table)
    console.print(
        f"{found.num_bytes:,} of {found.max_bytes:,} bytes kept; discarded: "
        f"{found.num_discarded:,} trajectories, {found.num_discarded_events:,} events"
    )


def dead_letters_json(url: str, run: str) -> str:
    """Return the dead letters of a run as JSON."""
    found = _read(url, run)
    content = asdict(found) | {"events": [_event_facts(event) for event in found.events]}
    return json.dumps(content, indent=2)


def print_dead_letter(url: str, run: str, name: str, console: Console) -> None:
    """Print a dead letter: its reason, and the defect of each of its records."""
    found = _open(url, run, name)
    if isinstance(found, RejectedEvent):
        lines = _event_lines(found)
    else:
        name = keys.readable_name(found.trajectory.trajectory_id)
        lines = _trajectory_lines(found)
    table = Table(title=f"{run}: {name}", show_header=False)
    for what, text in lines:
        table.add_row(what, text)
    console.print(table)


def dead_letter_json(url: str, run: str, name: str) -> str:
    """Return everything that is stored of a dead letter as JSON: bytes in hex, decoded values."""
    found = _open(url, run, name)
    is_event = isinstance(found, RejectedEvent)
    facts = _event_facts(found) if is_event else _trajectory_facts(found)
    return json.dumps(facts, indent=2, default=_json_value)


def export_dead_letter(url: str, run: str, name: str, path: Path) -> None:
    """Write everything that is stored of a dead letter to a file, as JSON."""
    path.write_text(dead_letter_json(url, run, name), encoding="utf-8")


def discard(url: str, run: str, names: Sequence[str]) -> int:
    """Discard dead letters; return the number that this call discarded."""
    with connect(url) as client:
        run = open_run(client, run)
        return sum(_discard(client, run, name) for name in names)


def _discard(client: redis.Redis, run: str, name: str) -> bool:
    if _is_event(name):
        return discard_event(client, run, name)
    return discard_trajectory(client, run, find_trajectory(client, run, name))


def _read(url: str, run: str) -> DeadLetters:
    with connect(url) as client:
        return read_dead_letters(client, open_run(client, run))


def _open(url: str, run: str, name: str) -> DeadContent | RejectedEvent:
    with connect(url) as client:
        run = open_run(client, run)
        if _is_event(name):
            return open_event(client, run, name)
        return open_trajectory(client, run, find_trajectory(client, run, name))


def _is_event(name: str) -> bool:
    """Return whether a name is the id of an event, and not of a trajectory.

    >>> _is_event("1700000000123-0"), _is_event("g/1/0")
    (True, False)
    """
    return "/" not in name


def _trajectory_lines(content: DeadContent) -> list[tuple[str, str]]:
    dead, seal = content.trajectory, content.seal
    lines = [
        ("reason", dead.reason),
        ("since", _time(dead.since_ms)),
        ("its group", dead.group_state),
    ]
    lines += [(f"turn {index}", _turn_text(found)) for index, found in enumerate(content.turns)]
    lines += [(f"turn {index}", "is not stored") for index in content.missing]
    if content.seal_problem:
        lines.append(("seal", content.seal_problem))
    elif seal is not None:
        reward = "none" if seal.reward is None else f"{seal.reward:g}"
        lines.append(("seal", f"{len(seal.turns)} turns, {seal.status}, reward {reward}"))
    return lines


def _turn_text(found: DeadTurn) -> str:
    size = f"{len(found.record):,} bytes"
    if found.turn is None:
        return f"{size}, not readable: {found.problem}"
    tokens = f"{size}, {len(found.turn.token_ids):,} tokens"
    return f"{tokens}; any value may be wrong: {found.problem}" if found.problem else tokens


def _event_lines(event: RejectedEvent) -> list[tuple[str, str]]:
    return [
        ("reason", event.reason),
        ("since", _time(event.since_ms)),
        ("bytes", f"{len(event.record):,}"),
        ("hex", event.record[:64].hex(" ")),
    ]


def _trajectory_facts(content: DeadContent) -> dict[str, Any]:
    seal = None if content.seal is None else asdict(content.seal)
    return asdict(content.trajectory) | {
        "turns": [
            {
                "problem": found.problem,
                "content": None if found.turn is None else asdict(found.turn),
                "record": found.record.hex(),
            }
            for found in content.turns
        ],
        "missing_turns": [*content.missing],
        "seal": {
            "problem": content.seal_problem,
            "content": seal,
            "record": content.seal_record.hex(),
        },
    }


def _event_facts(event: RejectedEvent) -> dict[str, Any]:
    return {
        "event_id": event.event_id,
        "reason": event.reason,
        "since_ms": event.since_ms,
        "num_bytes": len(event.record),
        "record": event.record.hex(),
    }


def _json_value(value: object) -> object:
    """Return an array as a list; JSON has every other type."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no value of JSON")


def _time(ms: int) -> str:
    """Return a time as text; as a number if it is after the year 9999, as of a damaged event."""
    if ms >= _YEAR_10000_MS:
        return f"{ms} ms"
    return datetime.fromtimestamp(ms / 1_000, UTC).isoformat(sep=" ", timespec="seconds")
