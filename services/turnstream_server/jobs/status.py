"""One screen about a run: progress, ledger, newest batch, and the first reason for waiting."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import redis
from rich.console import Console
from rich.live import Live
from rich.table import Table

from turnstream.errors import RunNotFoundError, UnknownFormatError, WaitReason
from turnstream.store.run.configs import open_run
from turnstream.store.run.runs import list_runs
from turnstream.store.waits.wait_reasons import reasons
from turnstream_server.bus.queries.ledger import RunSummary, run_summary
from turnstream_server.bus.queries.run_snapshot import read_snapshot
from turnstream_server.jobs.batches import BatchNumbers
from turnstream_server.jobs.runs import newest_batch, no_runs, state_of, steps_text
from turnstream_server.jobs.store_client import store_client

logger = logging.getLogger(__name__)

REFRESH_S = 2.0
"""Seconds between two refreshes of `--watch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of one run; its parts are read one after the other.

    Attributes:
        summary: progress and counts.
        newest_batch: numbers of the newest planned batch; None before the first.
        reason: the first reason for waiting.
    """

    summary: RunSummary
    newest_batch: BatchNumbers | None
    reason: WaitReason

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) for people."""
        seen, frontier = self.summary, self.summary.frontier
        version = "none" if seen.newest_version is None else str(seen.newest_version.version)
        ledger = [f"{number:,} {state}" for state, number in seen.ledger.by_state.items() if number]
        rows = [
            ("run", f"{seen.run}: {state_of(frontier)}"),
            ("steps", steps_text(frontier)),
            ("groups", f"{frontier.num_opened_groups:,} opened, {frontier.num_open_groups:,} open"),
            ("ledger", f"{seen.ledger.accepted:,} accepted: {', '.join(ledger) or 'none'}"),
            ("policy version", version),
        ]
        if self.newest_batch is not None:
            names = {"mean reward", "padding share", "merge ratio", "policy versions"}
            told = [f"{name} {value}" for name, value in self.newest_batch.rows() if name in names]
            rows.append(("newest batch", ", ".join(told)))
        return [*rows, ("waits", f"{self.reason.kind}: {self.reason.sentence}")]

    def content(self) -> dict[str, object]:
        """Return the same for programs."""
        seen, frontier = self.summary, self.summary.frontier
        return {
            "run": seen.run,
            "state": state_of(frontier),
            "planned": frontier.planned,
            "stepped": frontier.stepped,
            "committed": frontier.committed,
            "groups_opened": frontier.num_opened_groups,
            "groups_open": frontier.num_open_groups,
            "accepted": seen.ledger.accepted,
            "ledger": {state.value: number for state, number in seen.ledger.by_state.items()},
            "policy_version": None if seen.newest_version is None else seen.newest_version.version,
            "newest_batch": None if self.newest_batch is None else asdict(self.newest_batch),
            "reason": self.reason._asdict(),
        }


def print_status(url: str, run: str | None, console: Console) -> None:
    """Print the status of one run, or of every run."""
    console.print(_table(url, read_status(url, run)))


def status_json(url: str, run: str | None) -> str:
    """Return the same as JSON: an object, or a list of them without a run."""
    found = [each.content() for each in read_status(url, run)]
    return json.dumps(found if run is None else found[0], indent=2)


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


def read_status(url: str, run: str | None) -> list[RunStatus]:
    """Return the status of one run, or of all runs of the store for None."""
    with store_client(url) as client:
        if run is not None:
            return [_read(client, open_run(client, run))]
        return [each for name in list_runs(client) if (each := _read_if_there(client, name))]


def _read_if_there(client: redis.Redis, run: str) -> RunStatus | None:
    try:
        return _read(client, run)
    except RunNotFoundError:  # a deletion is under way
        return None
    except UnknownFormatError as error:
        logger.warning("%s", error)
        return None


def _read(client: redis.Redis, run: str) -> RunStatus:
    summary = run_summary(client, run)
    return RunStatus(
        summary=summary,
        newest_batch=newest_batch(client, run, summary.frontier),
        reason=reasons(read_snapshot(client, run))[0],
    )


def _table(url: str, found: Sequence[RunStatus]) -> Table | str:
    if not found:
        return no_runs(url)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for number, status in enumerate(found):
        if number:
            table.add_row()
        for row in status.rows():
            table.add_row(*row)
    return table
