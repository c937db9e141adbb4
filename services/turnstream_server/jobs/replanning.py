"""Plans of damaged payload, withdrawn on an operator's word, in words for people and programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime

from turnstream.store.configs import open_run
from turnstream.store.connection import connect
from turnstream_server.bus.replans import Replanned, await_replan, request_replan


def replan(url: str, run: str, step: int | None, *, wait_s: float) -> Replanned:
    """Have the batcher that plans a run withdraw its plans from a damaged step on.

    Args:
        url: of the store.
        run: name of the run.
        step: the damaged one; None for the first that is planned, not stepped, and damaged.
        wait_s: longest wait for the batcher.

    Raises:
        ConflictError: nothing is damaged; or the step is stepped, or not planned.
        NotReadyError: no batcher has answered; the request stands.
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    with connect(url) as client:
        run = open_run(client, run)
        return await_replan(client, run, request_replan(client, run, step=step), wait_s=wait_s)


def replanned_text(done: Replanned) -> str:
    """What was withdrawn, in one line.

    >>> replanned_text(
    ...     Replanned(first_step=3, newest_step=4, num_dead=2, dead=("g/0/0",), since_ms=0)
    ... )
    'steps 3 to 4, since 1970-01-01 00:00:00+00:00, without g/0/0 and 1 more'
    """
    steps = f"step {done.first_step}"
    if done.newest_step > done.first_step:
        steps = f"steps {done.first_step} to {done.newest_step}"
    since = datetime.fromtimestamp(done.since_ms // 1_000, UTC)
    more = done.num_dead - len(done.dead)
    names = ", ".join(done.dead) + (f" and {more} more" if more else "")
    return f"{steps}, since {since}, without {names}"


def replanned_json(run: str, done: Replanned) -> str:
    """The same as JSON."""
    return json.dumps({"run": run, **asdict(done)}, indent=2)
