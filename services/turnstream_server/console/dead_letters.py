"""The dead letters of a run, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.configs import open_run
from turnstream_server.ledger.admin.dead_letters import (
    DeadContent,
    discard_event,
    discard_trajectory,
    find_trajectory,
    open_event,
    open_trajectory,
    read_dead_letters,
)
from turnstream_server.screen import make_table, time_text


def list_dead_letters(url: str, run: str) -> dict[str, Any]:
    """Return the dead letters of a run in plain values."""
    with connect(url) as client:
        return asdict(read_dead_letters(client, open_run(client, run)))


def print_dead_letters(content: dict[str, Any], console: Console) -> None:
    """Print the dead letters of a run, from `list_dead_letters`: reason, time and size."""
    named = [(keys.readable_name(dead["name"]), dead) for dead in content["trajectories"]]
    named += [(f"event {dead['name']}", dead) for dead in content["events"]]
    rows = [
        (name, time_text(dead["since_ms"]), dead["num_bytes"], dead["reason"])
        for name, dead in named
    ]
    columns = ("dead letter", "since", "bytes", "reason")
    console.print(make_table(columns, rows, title=f"dead letters of {content['run']}"))
    console.print(
        f"{content['num_bytes']:,} of {content['max_bytes']:,} bytes kept; "
        f"{content['num_discarded']:,} trajectories discarded"
    )


def print_dead_letter(url: str, run: str, name: str, console: Console) -> None:
    """Print a dead letter: its reason, and the defect of each of its records."""
    letter, records = _open(url, run, name)
    is_event = _is_event(letter.name)
    shown = letter.name if is_event else keys.readable_name(letter.name)
    table = Table(title=f"{run}: {shown}", show_header=False)
    table.add_row("reason", letter.reason)
    table.add_row("since", time_text(letter.since_ms))
    labels = [f"turn {index}" for index in range(len(records) - 1)]
    for label, found in zip([*labels, "event" if is_event else "seal"], records, strict=True):
        problem = f": {found.problem}" if found.problem else ""
        table.add_row(label, f"{len(found.record):,} bytes{problem}")
    console.print(table)


def dead_letter_json(url: str, run: str, name: str) -> str:
    """Return everything that is stored of a dead letter as JSON: bytes in hex, decoded values."""
    letter, records = _open(url, run, name)
    found = [
        {
            "problem": each.problem,
            "content": None if each.content is None else asdict(each.content),
            "record": each.record.hex(),
        }
        for each in records
    ]
    return json.dumps(asdict(letter) | {"records": found}, indent=2, default=np.ndarray.tolist)


def discard(url: str, run: str, names: Sequence[str]) -> int:
    """Discard dead letters; return the number that this call discarded."""
    with connect(url) as client:
        run = open_run(client, run)
        return sum(
            discard_event(client, run, name)
            if _is_event(name)
            else discard_trajectory(client, run, find_trajectory(client, run, name))
            for name in names
        )


def _open(url: str, run: str, name: str) -> DeadContent:
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
