"""Forks: new runs with the history of another run up to a checkpoint.

The new run is created at once, as if it had trained and released every step up to the token's
itself. A trainer with that checkpoint starts with its token. The origin does not change, and only
the origin can report its batches.
"""

from __future__ import annotations

import itertools
from typing import Any, Final, NamedTuple

import redis

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.staleness import VersionSteps
from turnstream.errors import ConflictError, ReleasedError, RunNotFoundError, StoreBehindError
from turnstream.records.configs import decode_config, encode_config
from turnstream.records.events import decode_event
from turnstream.records.snapshots import PlannerSnapshot, decode_snapshot, encode_snapshot
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import create_under, find_run
from turnstream.store.client.scripts import Script, run_command
from turnstream.store.run.configs import read_config
from turnstream.store.run.runs import list_run
from turnstream.types import RecoveryToken, VersionAnnounced
from turnstream.types.names import RunId, checked_run_name
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.core.frontier import Frontier, Origin, read_frontier
from turnstream_server.ledger.core.scan import stream_entries
from turnstream_server.ledger.planning.manifests import read_plan

MAX_VERSIONS: Final = 1_000
"""Newest announcements that are copied, for generators; the planner has all of them."""

_FORK = Script("fork_run", "turnstream_server.ledger.admin")


class _Versions(NamedTuple):
    """The announced versions of an origin up to a step, and the highest ever; -1 for none."""

    records: list[tuple[int, bytes]]
    steps: dict[int, int]
    lineage: str
    highest: int


def fork_run(
    client: redis.Redis,
    run: str,
    new_run: str,
    token: RecoveryToken,
    *,
    config: BatchingConfig | None = None,
) -> Origin:
    """Create a run that continues from a checkpoint of another one; a repeat changes nothing.

    Its trainer starts with the same token and gets the next step from groups of the new run. Chain,
    row ids and policy versions continue. Every group name is free in the new run.

    Args:
        client: client of the store.
        run: the origin.
        new_run: name of the new run, which may be that of a deleted one.
        token: names a committed step of the origin that is still retained.
        config: None takes the one that is in force in the origin.

    Raises:
        InvalidConfigError: no new run can have this name.
        RunNotFoundError: no such origin.
        StoreBehindError: the origin does not have the batch of the token.
        ReleasedError: the step is no longer retained.
        ConflictError: the step is not committed, or the new name is taken.
        StoreUnavailableError: the store cannot be reached; repeat the call.
    """
    run = find_run(client, run)
    if run.name == new_run:
        raise ConflictError(f"run {run!r} cannot be forked into itself")
    new_id = find_run(client, checked_run_name(new_run))
    origin = _find_fork(client, run, new_id, token, config=config)
    if origin is None:
        new_id, origin = _make_fork(client, run, new_id, token, config=config)
        failpoint("fork.after_made")
    list_run(client, new_id)
    return origin


def token_of_step(client: redis.Redis, run: str, step: int) -> RecoveryToken:
    """Return the token of a committed step.

    Raises:
        ReleasedError: the step is no longer retained.
        ConflictError: the step is not planned.
    """
    run = find_run(client, run)
    frontier = read_frontier(client, run)
    with translating():
        entry: Any = client.hget(keys.run_keys(run).batches, str(step))
    if step and step < frontier.released:
        raise _not_retained(step, frontier)
    if step and entry is None:
        raise ConflictError(f"step {step} of run {run!r} is not planned; {frontier.planned} are")
    chain_hash = entry.decode().partition(":")[2] if entry else ""
    return RecoveryToken(lineage=frontier.lineage, step=step, chain_hash=chain_hash)


def _find_fork(
    client: redis.Redis,
    run: RunId,
    new_run: RunId,
    token: RecoveryToken,
    *,
    config: BatchingConfig | None,
) -> Origin | None:
    """Return the origin of the new run if an equal call made it before, else None."""
    try:
        origin = read_frontier(client, new_run).origin
    except RunNotFoundError:
        return None
    if origin is None or not _is_from(origin, run, token):
        raise ConflictError(f"run {new_run!r} exists, and was not forked from there")
    with translating():
        first: Any = client.hget(keys.run_keys(new_run).config, "1")
    if config is not None and decode_config(first, run=new_run) != config:
        raise ConflictError(f"run {new_run!r} was forked with another config")
    return origin


def _is_from(origin: Origin, run: RunId, token: RecoveryToken) -> bool:
    """Return whether a fork began at the token; its origin may have another manifest hash now."""
    is_it = origin.run == run or (token.step > 0 and RunId(origin.run).name == run.name)
    return is_it and (origin.step, origin.manifest_hash) == (token.step, token.chain_hash)


def _make_fork(
    client: redis.Redis,
    run: RunId,
    new_run: RunId,
    token: RecoveryToken,
    *,
    config: BatchingConfig | None,
) -> tuple[RunId, Origin]:
    """Return the id of the new run: another one if `new_run` was deleted in between."""
    versions = _read_versions(client, run, through_step=token.step)
    origin, next_row_id = _read_origin(client, run, token)
    config = config or read_config(client, run)[1]
    snapshot = PlannerSnapshot(
        position="0-0",
        step=token.step,
        manifest_hash=token.chain_hash,
        next_row_id=next_row_id,
        versions=versions.steps,
        lineage=versions.lineage,
    )
    words = (
        str(origin),
        encode_config(config),
        f"{keys.encode_name(run)}@{token.step}",
        token.step * config.batch_groups,
        versions.highest,
        encode_snapshot(snapshot),
    )
    records = [*itertools.chain.from_iterable(versions.records[-MAX_VERSIONS:])]

    def create(run_id: RunId) -> int:
        names = keys.run_keys(run_id)
        where = (
            *(names.frontier, names.config, names.counts, names.batches, names.snapshot),
            *(names.versions, names.clock, keys.incarnation_key(run_id)),
        )
        return run_command(client, _FORK(where, *words, run_id.incarnation, *records))

    made, _ = create_under(client, new_run.name, create)
    return made, origin


def _read_origin(client: redis.Redis, run: str, token: RecoveryToken) -> tuple[Origin, int]:
    """Return the origin of the token, and the first row id after it."""
    step, names = token.step, keys.run_keys(run)
    row_id = _next_row_id(client, run, step)
    with translating():
        entry: Any = client.hget(names.batches, str(step))
    frontier = read_frontier(client, run)  # read last: its steps were retained before
    if step < frontier.released:
        raise _not_retained(step, frontier)
    total, _, chain_hash = (entry or b"0:").decode().partition(":")
    if chain_hash != token.chain_hash or (step and not entry):
        raise StoreBehindError(
            f"the token names the manifest {token.chain_hash!r} as step {step}, run {run!r} has "
            f"{chain_hash!r}, and {frontier.planned} steps"
        )
    if step > frontier.committed:
        raise ConflictError(
            f"step {step} of run {run!r} is not committed; {frontier.committed} steps are"
        )
    if row_id is None:
        raise ConflictError(f"run {run!r} has lost the plan of step {step}")
    origin = Origin(run=run, step=step, num_trajectories=int(total), manifest_hash=token.chain_hash)
    return origin, row_id


def _next_row_id(client: redis.Redis, run: str, step: int) -> int | None:
    """Return the first row id after a step; None if its plan is released."""
    if step == 0:
        return 0
    stored = read_plan(client, run, step)
    if stored is not None:
        return stored.manifest.end_row_id
    following = read_plan(client, run, step + 1)
    if following is not None:
        return following.manifest.mini_batches[0].first_row_id
    with translating():
        record: Any = client.hget(keys.run_keys(run).snapshot, "record")
    snapshot = None if record is None else decode_snapshot(record)
    return snapshot.next_row_id if snapshot is not None and snapshot.step == step else None


def _read_versions(client: redis.Redis, run: str, *, through_step: int) -> _Versions:
    """Return the versions that were announced up to a step, with the steps of their ages."""
    known, rollbacks = VersionSteps(), read_frontier(client, run).rollbacks
    records: dict[int, tuple[str, bytes]] = {}
    for _, record in stream_entries(client, keys.run_keys(run).versions):
        announced = decode_event(record)
        assert isinstance(announced, VersionAnnounced)  # nothing else is written there
        known.announce(announced)
        records[announced.version] = (announced.lineage, record)
    steps: dict[int, int] = {}
    for version, made_after in known.steps.items():
        lineage = records[version][0]
        later = itertools.takewhile(lambda each, own=lineage: each.lineage != own, rollbacks)
        step = min([made_after, *(rollback.step for rollback in later)])
        if step <= through_step:
            steps[version] = step
    return _Versions(
        records=[(version, records[version][1]) for version in steps],
        steps=steps,
        lineage=records[max(steps)][0] if steps else "",
        highest=max(records, default=-1),
    )


def _not_retained(step: int, frontier: Frontier) -> ReleasedError:
    return ReleasedError(
        f"step {step} is no longer retained: the oldest token that can be taken up is that of "
        f"step {frontier.released}"
    )
