"""The status of a run on one screen, and the reasons why it waits."""

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
from turnstream.store.run.configs import open_run
from turnstream.store.run.runs import list_runs
from turnstream.store.waits.wait_reasons import reasons
from turnstream_server.console.runs import no_runs
from turnstream_server.console.store_client import store_client
from turnstream_server.ledger.queries.batch_facts import BatchNumbers
from turnstream_server.ledger.queries.ledger import run_summary
from turnstream_server.ledger.queries.run_facts import common_facts, progress_facts
from turnstream_server.ledger.queries.run_snapshot import read_snapshot
from turnstream_server.screen import facts_table

logger = logging.getLogger(__name__)

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
