"""The runs of a store: a line for each, settings, status, and the reasons why they wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import redis
from rich.console import Console
from rich.live import Live
from rich.table import Table

from turnstream.errors import RunNotFoundError, StoreUnavailableError, UnknownFormatError
from turnstream.store.client.addresses import address_of
from turnstream.store.run.configs import open_run
from turnstream.store.run.runs import list_runs
from turnstream.store.waits.wait_reasons import reasons
from turnstream_server.console.ledger import duration
from turnstream_server.console.store_client import store_client
from turnstream_server.ledger.queries.ledger import run_summary
from turnstream_server.ledger.queries.run_facts import (
    BatchNumbers,
    common_facts,
    progress_facts,
    run_facts,
    run_line,
)
from turnstream_server.ledger.queries.run_snapshot import read_snapshot
from turnstream_server.screen import cell_text, facts_table, make_table

logger = logging.getLogger(__name__)

_COLUMNS: Final = (
    *("run", "state", "planned", "stepped", "committed", "accepted", "trained", "origin"),
)


def read_runs(url: str) -> list[dict[str, Any]]:
    """Return the state and the progress of every run."""
    with store_client(url) as client:
        return [run_line(client, run) for run in list_runs(client)]


def print_runs(url: str, rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a line per run, from `read_runs`; no name is cut or wrapped."""
    if not rows:
        console.print(no_runs(url), soft_wrap=True, highlight=False)
        return
    table = [_COLUMNS, *([cell_text(row.get(name)) for name in _COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        line = "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
        console.print(line.rstrip(), soft_wrap=True, highlight=False)


def no_runs(url: str) -> str:
    """Return the sentence for an empty store, with the command that creates a run."""
    return (
        f"no runs in the store at {address_of(url)}; create one: "
        "turnstream run create NAME --set batch_groups=8"
    )


def read_run(url: str, run: str) -> dict[str, Any]:
    """Return progress, numbers of the newest batch, observers and settings of a run."""
    with store_client(url) as client:
        return run_facts(client, run)


def print_run(content: Mapping[str, Any], console: Console, *, show_all: bool = False) -> None:
    """Print a run from `read_run`; without `show_all` the settings at their default are omitted."""
    table = facts_table(_run_rows(content))
    if content["newest_batch"] is not None:
        table.add_section()
        for row in BatchNumbers(**content["newest_batch"]).rows():
            table.add_row(*row)
    console.print(table)
    if content["observers"]:
        columns = ("observer", "step seen", "silent for", "expires in")
        rows = [
            (
                *(each["name"], each["seen"], duration(each["silent_s"])),
                duration(each["left_s"]) if each["left_s"] > 0 else "it has expired",
            )
            for each in content["observers"]
        ]
        console.print(make_table(columns, rows, box=None, pad_edge=False))
    console.print(f"settings, revision {content['revision']} (* differs from the default)")
    table = facts_table()
    for name, value in content["settings"].items():
        is_changed = name in content["changed_settings"]
        if is_changed or show_all:
            table.add_row(f"{'*' if is_changed else ' '} {name}", str(value))
    for revision in content["pending_revisions"].items():
        table.add_row(*revision)
    console.print(table)
    if not show_all:
        console.print("--all prints the settings at their default")


def _run_rows(seen: Mapping[str, Any]) -> list[tuple[str, str]]:
    version, origin = seen["policy_version"], seen["origin"]
    rollback = "{lineage} continues from step {step}; the steps up to {stepped} are trained again"
    steps = "{planned} planned, {stepped} stepped, {committed} committed"
    rows = [
        ("run", f"{seen['run']}: {seen['state']}"),
        ("steps", steps.format(**seen["steps"])),
        ("groups opened", f"{seen['groups_opened']:,}"),
        ("policy version", "none yet" if version is None else str(version)),
        ("trainer", "session {session_epoch}, {dp_world_size} ranks".format(**seen)),
        ("planner", seen["planner"] or "none"),
        ("lineage", seen["lineage"]),
        *[("rollback", rollback.format(**each)) for each in seen["rollbacks"]],
    ]
    if origin is not None:
        rows.append(("origin", f"step {origin['step']} of {origin['run']}"))
    if seen["paused"]:
        rows.append(("paused", seen["paused"]))
    return rows


REFRESH_S: Final = 2.0
"""Seconds between two refreshes of `--watch`."""

_SHOWN_NUMBERS: Final = {"mean reward", "padding share", "merge ratio", "policy versions"}


def read_status(url: str, run: str | None) -> list[dict[str, Any]]:
    """Return the status of one run, or of all runs of the store for None.

    UnknownFormatError if other releases wrote all of them.
    """
    with store_client(url) as client:
        if run is not None:
            return [_read(client, open_run(client, run))]
        return _read_all(client)


def print_status(url: str, found: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the status of these runs, from `read_status`."""
    console.print(_table(url, found))


def watch_status(
    url: str,
    run: str | None,
    console: Console,
    *,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Print the status again every two seconds, until Ctrl-C."""
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            live.update(_table(url, read_status(url, run)), refresh=True)
            pause(REFRESH_S)


def read_reasons(url: str, run: str) -> dict[str, Any]:
    """Return why a run waits, the most important reason first; a silent store is a reason."""
    try:
        with store_client(url) as client:
            found = reasons(read_snapshot(client, open_run(client, run)))
    except StoreUnavailableError as error:
        found = error.reasons
    return {"run": run, "reasons": [reason._asdict() for reason in found]}


def print_reasons(content: Mapping[str, Any], console: Console) -> None:
    """Print one reason a line, from `read_reasons`."""
    for reason in content["reasons"]:
        console.print(f"{reason['kind']}: {reason['sentence']}", highlight=False, soft_wrap=True)


def _read_all(client: redis.Redis) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    unknown: list[UnknownFormatError] = []
    for run in list_runs(client):
        try:
            found.append(_read(client, run))
        except RunNotFoundError:  # a deletion is in progress
            continue
        except UnknownFormatError as error:
            unknown.append(error)
    if unknown and not found:
        raise unknown[0]
    for error in unknown:
        logger.warning("%s", error)
    return found


def _read(client: redis.Redis, run: str) -> dict[str, Any]:
    seen = run_summary(client, run)
    return {
        "run": run,
        **progress_facts(seen.frontier),
        **common_facts(client, seen),
        "groups_open": seen.frontier.num_open_groups,
        "accepted": seen.ledger.accepted,
        "ledger": {state.value: number for state, number in seen.ledger.by_state.items()},
        "reason": reasons(read_snapshot(client, run))[0]._asdict(),
    }


def _table(url: str, found: Sequence[Mapping[str, Any]]) -> Table | str:
    if not found:
        return no_runs(url)
    table = facts_table(_rows(found[0]))
    for status in found[1:]:
        table.add_row()
        for row in _rows(status):
            table.add_row(*row)
    return table


def _rows(seen: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) of one run."""
    version, reason = seen["policy_version"], seen["reason"]
    states = [f"{number:,} {state}" for state, number in seen["ledger"].items() if number]
    rows = [
        ("run", f"{seen['run']}: {seen['state']}"),
        ("steps", "{planned} planned, {stepped} stepped, {committed} committed".format(**seen)),
        ("groups", f"{seen['groups_opened']:,} opened, {seen['groups_open']:,} open"),
        ("ledger", f"{seen['accepted']:,} accepted: {', '.join(states) or 'none'}"),
        ("policy version", "none" if version is None else str(version)),
    ]
    if seen["newest_batch"] is not None:
        numbers = BatchNumbers(**seen["newest_batch"]).rows()
        shown = [f"{name} {value}" for name, value in numbers if name in _SHOWN_NUMBERS]
        rows.append(("newest batch", ", ".join(shown)))
    return [*rows, ("waits", f"{reason['kind']}: {reason['sentence']}")]
