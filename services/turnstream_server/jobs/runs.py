"""The runs of a store, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, Final

import redis
from rich.console import Console
from rich.table import Table

from turnstream.batching.config import BatchingConfig
from turnstream.errors import RunNotFoundError, UnknownFormatError
from turnstream.records.configs import encode_config
from turnstream.store.client.connection import address_of
from turnstream.store.run.configs import open_run
from turnstream.store.run.revisions import Revisions, read_revisions
from turnstream.store.run.runs import list_runs
from turnstream_server.bus.admin.deletion import deleting_since_ms
from turnstream_server.bus.core.frontier import Frontier, Origin, Rollback
from turnstream_server.bus.planning.manifests import read_plan
from turnstream_server.bus.queries.ledger import RunSummary, run_summary
from turnstream_server.bus.sessions.observers import Observer, read_observers
from turnstream_server.jobs.batches import BatchNumbers, numbers_of
from turnstream_server.jobs.ledger import duration
from turnstream_server.jobs.run_commands import pending_revisions
from turnstream_server.jobs.store_client import store_client

_COLUMNS: Final = (
    "run",
    "state",
    "planned",
    "stepped",
    "committed",
    "accepted",
    "trained",
    "origin",
)


def read_runs(url: str) -> list[dict[str, Any]]:
    """Return the state and the progress of every run."""
    with store_client(url) as client:
        return [_run_facts(client, run) for run in list_runs(client)]


def print_runs(url: str, rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print one line per run, from `read_runs`."""
    if not rows:
        console.print(no_runs(url), soft_wrap=True, highlight=False)
        return
    cells = [[_cell(row.get(name)) for name in _COLUMNS] for row in rows]
    for line in aligned([[*_COLUMNS], *cells]):
        console.print(line, soft_wrap=True, highlight=False)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row with aligned columns; no cell is cut or wrapped.

    >>> aligned([["run", "state"], ["maze", "open"]])
    ['run   state', 'maze  open']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


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
        is_going = deleting_since_ms(client, run) is not None
        return {"run": run, "state": "being deleted" if is_going else "gone"}
    except UnknownFormatError:
        return {"run": run, "state": "of another release"}
    frontier = seen.frontier
    return {
        "run": run,
        "state": state_of(frontier),
        "planned": frontier.planned,
        "stepped": frontier.stepped,
        "committed": frontier.committed,
        "accepted": seen.ledger.accepted,
        "trained": seen.ledger.num_trained,
        "origin": origin_text(frontier.origin) or None,
    }


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


def state_of(frontier: Frontier) -> str:
    """Return "open", "paused", "closed" (steps may follow) or "finished"."""
    if frontier.is_finished and frontier.stepped >= frontier.planned:
        return "finished"
    if frontier.is_closed:
        return "closed"
    return "open" if frontier.paused is None else "paused"


def steps_text(frontier: Frontier) -> str:
    """Return the progress of a run in a few words."""
    numbers = (frontier.planned, frontier.stepped, frontier.committed)
    return "{} planned, {} stepped, {} committed".format(*numbers)


def origin_text(origin: Origin | None) -> str:
    """Return the origin of a fork in few words; "" for another run.

    >>> origin_text(Origin(run="maze", step=12, num_trajectories=96, manifest_hash="ab"))
    'step 12 of maze'
    """
    return "" if origin is None else f"step {origin.step} of {origin.run}"


def print_run(url: str, run: str, console: Console, *, show_all: bool = False) -> None:
    """Print progress, numbers of the newest batch, and settings of a run."""
    with store_client(url) as client:
        run = open_run(client, run)
        seen = run_summary(client, run)
        revisions = read_revisions(client, run)
        observers = read_observers(client, run)
        numbers = newest_batch(client, run, seen.frontier)
    table = _lines()
    for name, value in _run_rows(seen):
        table.add_row(name, value)
    if numbers is not None:
        table.add_section()
        for name, value in numbers.rows():
            table.add_row(name, value)
    console.print(table)
    if observers:
        console.print(_observer_table(observers))
    console.print(f"settings, revision {revisions.in_force} (* differs from the default)")
    console.print(_settings_table(revisions, show_all=show_all))
    if not show_all:
        console.print("--all prints the settings at their default")


def run_json(url: str, run: str) -> str:
    """Return the same as JSON, with every setting."""
    with store_client(url) as client:
        run = open_run(client, run)
        seen = run_summary(client, run)
        revisions = read_revisions(client, run)
        observers = read_observers(client, run)
        numbers = newest_batch(client, run, seen.frontier)
    config = revisions.config(revisions.in_force)
    content = {
        "run": run,
        "state": state_of(seen.frontier),
        "steps": {
            "planned": seen.frontier.planned,
            "stepped": seen.frontier.stepped,
            "committed": seen.frontier.committed,
        },
        "groups_opened": seen.frontier.num_opened_groups,
        "policy_version": None if seen.newest_version is None else seen.newest_version.version,
        "session_epoch": seen.frontier.session_epoch,
        "dp_world_size": seen.frontier.dp_world_size,
        "planner": seen.planner or None,
        "lineage": seen.frontier.lineage,
        "rollbacks": [each._asdict() for each in seen.frontier.rollbacks],
        "origin": None if seen.frontier.origin is None else asdict(seen.frontier.origin),
        "paused": seen.frontier.paused,
        "newest_batch": None if numbers is None else asdict(numbers),
        "observers": [asdict(each) for each in observers],
        "revision": revisions.in_force,
        "settings": json.loads(encode_config(config)),
        "changed_settings": sorted(changed_names(config)),
    }
    return json.dumps(content, indent=2)


def newest_batch(client: redis.Redis, run: str, frontier: Frontier) -> BatchNumbers | None:
    """Return the numbers of the newest planned batch; None before the first."""
    stored = read_plan(client, run, frontier.planned) if frontier.planned else None
    return None if stored is None else numbers_of([stored.manifest])


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


def rollback_text(rollback: Rollback) -> str:
    """Return a rollback in few words.

    >>> rollback_text(Rollback("main-1", step=4, stepped=7))
    'main-1 continues from step 4; the steps up to 7 are trained again'
    """
    return (
        f"{rollback.lineage} continues from step {rollback.step}; the steps up to "
        f"{rollback.stepped} are trained again"
    )


def _settings_table(revisions: Revisions, *, show_all: bool) -> Table:
    config = revisions.config(revisions.in_force)
    changed = changed_names(config)
    table = _lines()
    for name, value in asdict(config).items():
        if name in changed or show_all:
            table.add_row(f"{'*' if name in changed else ' '} {name}", str(value))
    for which, changes in pending_revisions(revisions):
        table.add_row(which, changes)
    return table


def _lines() -> Table:
    """Return a table of names and values, without borders."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _observer_table(observers: Sequence[Observer]) -> Table:
    table = Table("observer", "step seen", "silent for", "forgotten in", box=None, pad_edge=False)
    for each in observers:
        left = duration(each.left_s) if each.left_s > 0 else "it is gone"
        table.add_row(each.name, str(each.seen), duration(each.silent_s), left)
    return table


def _run_rows(seen: RunSummary) -> list[tuple[str, str]]:
    frontier = seen.frontier
    version = seen.newest_version
    rows = [
        ("run", f"{seen.run}: {state_of(frontier)}"),
        ("steps", steps_text(frontier)),
        ("groups opened", f"{frontier.num_opened_groups:,}"),
        ("policy version", "none yet" if version is None else str(version.version)),
        ("trainer", f"session {frontier.session_epoch}, {frontier.dp_world_size} ranks"),
        ("planner", seen.planner or "none"),
        ("lineage", frontier.lineage),
        *[("rollback", rollback_text(each)) for each in frontier.rollbacks],
    ]
    if frontier.origin is not None:
        rows.append(("origin", origin_text(frontier.origin)))
    if frontier.paused:
        rows.append(("paused", frontier.paused))
    return rows
