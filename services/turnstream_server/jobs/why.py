"""The reasons why a run waits, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console

from turnstream.errors import StoreUnavailableError, WaitReason
from turnstream.store.run.configs import open_run
from turnstream.store.waits.wait_reasons import reasons
from turnstream_server.bus.queries.run_snapshot import read_snapshot
from turnstream_server.jobs.store_client import store_client


def print_reasons(url: str, run: str, console: Console) -> None:
    """Print one reason a line, the most important first; an unreachable store is a reason."""
    for reason in _reasons(url, run):
        console.print(f"{reason.kind}: {reason.sentence}", highlight=False, soft_wrap=True)


def reasons_json(url: str, run: str) -> str:
    """Return the same as JSON."""
    found = [reason._asdict() for reason in _reasons(url, run)]
    return json.dumps({"run": run, "reasons": found}, indent=2)


def _reasons(url: str, run: str) -> Sequence[WaitReason]:
    try:
        with store_client(url) as client:
            return reasons(read_snapshot(client, open_run(client, run)))
    except StoreUnavailableError as error:
        return error.reasons
