"""Runs in plain values: a line of each, and one with its settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields
from typing import Any

import redis

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.rules import changed_settings
from turnstream.errors import RunNotFoundError, UnknownFormatError
from turnstream.records.configs import encode_config
from turnstream.store.run.configs import Revisions, open_run, read_revisions
from turnstream_server.ledger.admin.deletion import deleting_since_ms
from turnstream_server.ledger.core.frontier import Frontier
from turnstream_server.ledger.planning.manifests import read_plan
from turnstream_server.ledger.queries.batch_facts import numbers_of
from turnstream_server.ledger.queries.ledger import RunSummary, run_summary
from turnstream_server.ledger.sessions.observers import read_observers


def run_line(client: redis.Redis, run: str) -> dict[str, Any]:
    """Return state and progress of a run; the state says why a run cannot be read."""
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


def run_facts(client: redis.Redis, run: str) -> dict[str, Any]:
    """Return progress, numbers of the newest batch, observers and settings of a run."""
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


def pending_revisions(revisions: Revisions) -> Iterator[tuple[str, str]]:
    """Yield the name and the changes of each revision that is not in force yet."""
    before = revisions.revision(revisions.in_force).config
    for each in revisions.pending:
        changes = changed_settings(before, each.config)
        values = ", ".join(f"{change.name}={setting_text(change.after)}" for change in changes)
        yield f"revision {each.number}, from step {each.from_step}", values or "as before"
        before = each.config


def setting_text(value: Any) -> str:
    """Return the value of a setting as a command prints it: JSON, or a text as it is."""
    return value if isinstance(value, str) else json.dumps(value, default=asdict)
