"""The runs of a store: a line for each, and one with its settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, Final

import redis
from rich.console import Console

from turnstream.batching.config import BatchingConfig
from turnstream.errors import RunNotFoundError, UnknownFormatError
from turnstream.records.configs import encode_config
from turnstream.store.client.connection import address_of
from turnstream.store.run.configs import open_run, read_revisions
from turnstream.store.run.runs import list_runs
from turnstream_server.bus.admin.deletion import deleting_since_ms
from turnstream_server.bus.core.frontier import Frontier
from turnstream_server.bus.planning.manifests import read_plan
from turnstream_server.bus.queries.ledger import RunSummary, run_summary
from turnstream_server.bus.sessions.observers import read_observers
from turnstream_server.jobs.ledger import duration
from turnstream_server.jobs.run_commands import pending_revisions
from turnstream_server.jobs.store_client import store_client
from turnstream_server.jobs.summary import BatchNumbers, numbers_of
from turnstream_server.screen import facts_table, make_table, shown

_COLUMNS: Final = (
    *("run", "state", "planned", "stepped", "committed", "accepted", "trained", "origin"),
)


def read_runs(url: str) -> list[dict[str, Any]]:
    """Return the state and the progress of every run."""
    with store_client(url) as client:
        return [_run_facts(client, run) for run in list_runs(client)]


def print_runs(url: str, rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a line per run, from `read_runs`; no name is cut or wrapped."""
    if not rows:
        console.print(no_runs(url), soft_wrap=True, highlight=False)
        return
    table = [_COLUMNS, *([shown(row.get(name)) for name in _COLUMNS] for row in rows)]
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


def _run_facts(client: redis.Redis, run: str) -> dict[str, Any]:
    try:
        seen = run_summary(client, run)
    except RunNotFoundError:
        is_deleted = deleting_since_ms(client, run) is not None
        return {"run": run, "state": "being deleted" if is_deleted else "gone"}
    except UnknownFormatError:
        return {"run": run, "state": "of another release"}
    origin = seen.frontier.origin
    return {
        "run": run,
        **progress_facts(seen.frontier),
        "accepted": seen.ledger.accepted,
        "trained": seen.ledger.num_trained,
        "origin": None if origin is None else f"step {origin.step} of {origin.run}",
    }


def progress_facts(frontier: Frontier) -> dict[str, Any]:
    """Return the state, and the planned, stepped and committed steps.

    The state is "open", "paused", "closed" (steps may follow) or "finished".
    """
    state = "open" if frontier.paused is None else "paused"
    if frontier.is_closed:
        state = "closed"
    if frontier.is_finished and frontier.stepped >= frontier.planned:
        state = "finished"
    return {"state": state} | {
        name: getattr(frontier, name) for name in ("planned", "stepped", "committed")
    }


def common_facts(client: redis.Redis, seen: RunSummary) -> dict[str, Any]:
    """Return the opened groups, the policy version, and the numbers of the newest batch."""
    frontier, version = seen.frontier, seen.newest_version
    stored = read_plan(client, seen.run, frontier.planned) if frontier.planned else None
    return {
        "groups_opened": frontier.num_opened_groups,
        "policy_version": None if version is None else version.version,
        "newest_batch": None if stored is None else asdict(numbers_of(stored.manifest)),
    }


def read_run(url: str, run: str) -> dict[str, Any]:
    """Return progress, numbers of the newest batch, observers and settings of a run."""
    with store_client(url) as client:
        run = open_run(client, run)
        seen = run_summary(client, run)
        revisions = read_revisions(client, run)
        observers = read_observers(client, run)
        common = common_facts(client, seen)
    config = revisions.revision(revisions.in_force).config
    frontier = seen.frontier
    steps = progress_facts(frontier)
    return {
        "run": run,
        "state": steps.pop("state"),
        "steps": steps,
        **common,
        "session_epoch": frontier.session_epoch,
        "dp_world_size": frontier.dp_world_size,
        "planner": seen.planner or None,
        "lineage": frontier.lineage,
        "rollbacks": [each._asdict() for each in frontier.rollbacks],
        "origin": None if frontier.origin is None else asdict(frontier.origin),
        "paused": frontier.paused,
        "observers": [asdict(each) for each in observers],
        "revision": revisions.in_force,
        "pending_revisions": dict(pending_revisions(revisions)),
        "settings": json.loads(encode_config(config)),
        "changed_settings": sorted(changed_names(config)),
    }


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


def changed_names(config: BatchingConfig) -> set[str]:
    """Return the names of the settings that differ from their default, or have none.

    >>> sorted(changed_names(BatchingConfig(batch_groups=8, mini_batch_groups=8, max_staleness=3)))
    ['batch_groups', 'max_staleness', 'mini_batch_groups']
    """
    return {
        field.name
        for field in fields(BatchingConfig)
        if field.default is MISSING or getattr(config, field.name) != field.default
    }


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
