"""The runs of a store: a line for each, and one with its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console

from turnstream.store.client.addresses import address_of
from turnstream.store.run.runs import list_runs
from turnstream_server.console.ledger import duration
from turnstream_server.console.store_client import store_client
from turnstream_server.ledger.queries.batch_facts import BatchNumbers
from turnstream_server.ledger.queries.run_facts import run_facts, run_line
from turnstream_server.screen import cell_text, facts_table, make_table

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
