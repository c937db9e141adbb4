"""The runs of a store, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import redis
from rich.console import Console
from rich.table import Table

from turnstream.errors import RunNotFoundError
from turnstream.store.revisions import read_revisions
from turnstream.store.run_ids import find_run
from turnstream.store.runs import list_runs
from turnstream_server.bus.deletion import deleting_since_ms
from turnstream_server.bus.frontier import Origin, Rollback
from turnstream_server.bus.ledger import RunSummary, run_summary
from turnstream_server.bus.observers import Observer, read_observers
from turnstream_server.bus.replans import last_replanned
from turnstream_server.jobs.ledger import duration
from turnstream_server.jobs.life import pending_revisions
from turnstream_server.jobs.looks import looking_at
from turnstream_server.jobs.replanning import replanned_text


def print_runs(url: str, console: Console) -> None:
    """One line per run.

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    table = Table(
        "run", "planned", "stepped", "committed", "accepted", "trained", "closed", "origin"
    )
    with looking_at(url) as client:
        for run in list_runs(client):
            table.add_row(run, *_run_row(client, run))
    console.print(table if table.row_count else "no runs")


def _run_row(client: redis.Redis, run: str) -> tuple[str, ...]:
    try:
        seen = run_summary(client, run)
    except RunNotFoundError:
        is_going = deleting_since_ms(client, run) is not None
        return ("being deleted" if is_going else "gone",)
    return (
        str(seen.frontier.planned),
        str(seen.frontier.stepped),
        str(seen.frontier.committed),
        f"{seen.ledger.accepted:,}",
        f"{seen.ledger.num_trained:,}",
        "yes" if seen.frontier.is_closed else "no",
        origin_text(seen.frontier.origin),
    )


def origin_text(origin: Origin | None) -> str:
    """Where a run was forked from, in few words; empty where it was not.

    >>> origin_text(Origin(run="maze", step=12, num_trajectories=96, manifest_hash="ab"))
    'step 12 of maze'
    """
    return "" if origin is None else f"step {origin.step} of {origin.run}"


def print_run(url: str, run: str, console: Console) -> None:
    """How far one run is, and its configuration.

    Raises:
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    with looking_at(url) as client:
        run = find_run(client, run)
        seen = run_summary(client, run)
        revisions = read_revisions(client, run)
        observers = read_observers(client, run)
        replanned = last_replanned(client, run)
    config = revisions.config(revisions.in_force)
    table = _run_table(seen)
    if replanned is not None:
        table.add_row("planned again", replanned_text(replanned))
    console.print(table)
    if observers:
        console.print(_observer_table(observers))
    settings = Table("setting", "value", title=f"configuration, revision {revisions.in_force}")
    for name, value in asdict(config).items():
        settings.add_row(name, str(value))
    settings.add_section()
    for which, changes in pending_revisions(revisions):
        settings.add_row(which, changes)
    console.print(settings)


def rollback_text(rollback: Rollback) -> str:
    """A rollback in few words.

    >>> rollback_text(Rollback("main-1", step=4, stepped=7))
    'main-1 goes on from step 4, where 7 was stepped'
    """
    return (
        f"{rollback.lineage} goes on from step {rollback.step}, where {rollback.stepped} was "
        "stepped"
    )


def _observer_table(observers: Sequence[Observer]) -> Table:
    table = Table("observer", "step seen", "silent for", "forgotten in")
    for each in observers:
        left = duration(each.left_s) if each.left_s > 0 else "it is gone"
        table.add_row(each.name, str(each.seen), duration(each.silent_s), left)
    return table


def _run_table(seen: RunSummary) -> Table:
    frontier = seen.frontier
    version = seen.newest_version
    table = Table(title=seen.run, show_header=False)
    table.add_row("batches", f"{frontier.planned} planned")
    table.add_row("", f"{frontier.stepped} stepped, {frontier.committed} committed")
    table.add_row("groups", f"{frontier.num_opened_groups} opened")
    table.add_row("policy version", "none yet" if version is None else str(version.version))
    table.add_row("trainer", f"session {frontier.session_epoch}, {frontier.dp_world_size} ranks")
    table.add_row("planner", seen.planner or "none")
    table.add_row("lineage", frontier.lineage)
    for each in frontier.rollbacks:
        table.add_row("rollback", rollback_text(each))
    table.add_row("origin", origin_text(frontier.origin) or "none")
    table.add_row("closed", "yes" if frontier.is_closed else "no")
    if frontier.paused is not None:
        table.add_row("paused", frontier.paused or "yes")
    return table
