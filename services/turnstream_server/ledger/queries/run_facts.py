"""Facts about a run and its batches, in plain values.

The HTTP API describes the numbers of a batch with the words of BatchNumbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Annotated, Any, Final

import redis
from pydantic import Field

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.rules import changed_settings
from turnstream.batching.merge.plan import Manifest, MiniBatchPlan
from turnstream.errors import NotReadyError, ReleasedError, RunNotFoundError, UnknownFormatError
from turnstream.records.compact import CompactBatch
from turnstream.records.configs import encode_config
from turnstream.records.tag_statistics import shown_figures
from turnstream.store.client import keys
from turnstream.store.run.configs import Revisions, open_run, read_revisions
from turnstream_server.ledger.admin.deletion import deleting_since_ms
from turnstream_server.ledger.core.frontier import Frontier, read_frontier
from turnstream_server.ledger.planning.manifests import StoredManifest, read_plan, read_plans
from turnstream_server.ledger.queries.ledger import RunSummary, run_summary, state_of_step
from turnstream_server.ledger.release.compact_records import (
    lost_records,
    past_batches,
    read_past_batch,
)
from turnstream_server.ledger.sessions.observers import read_observers


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNumbers:
    """Numbers of one batch."""

    num_groups: int
    num_trajectories: int
    num_rows: Annotated[int, Field(description="Merged sequences.")]
    num_tokens: Annotated[int, Field(description="Tokens of all rows.")]
    num_turn_tokens: Annotated[
        int, Field(description="Tokens of all turns, each with its whole prompt.")
    ]
    num_positions: Annotated[int, Field(description="Positions of the left-padded mini-batches.")]
    num_trained_tokens: Annotated[int, Field(description="Response tokens with mask 1.")]
    padding_share: Annotated[float, Field(description="Part of the positions, 0 to 1.")]
    merge_ratio: Annotated[float, Field(description="Tokens of turns / tokens of rows.")]
    mean_reward: Annotated[float | None, Field(description="Mean over the trajectories.")]
    oldest_version: Annotated[int | None, Field(description="Null if it is not known.")]
    newest_version: Annotated[int | None, Field(description="Null if it is not known.")]

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) for people."""
        versions = "unknown"
        if self.oldest_version is not None:
            versions = f"{self.oldest_version} to {self.newest_version}"
        if self.oldest_version == self.newest_version is not None:
            versions = str(self.newest_version)
        return [
            ("groups", f"{self.num_groups:,} with {self.num_trajectories:,} trajectories"),
            ("tokens", f"{self.num_tokens:,} in {self.num_rows:,} rows"),
            ("trained tokens", f"{self.num_trained_tokens:,}"),
            ("padding share", f"{self.padding_share:.1%}"),
            ("merge ratio", f"{self.merge_ratio:.2f}"),
            ("policy versions", versions),
            ("mean reward", "-" if self.mean_reward is None else f"{self.mean_reward:.3f}"),
        ]


def numbers_of(manifest: Manifest) -> BatchNumbers:
    """Return the numbers of a planned batch."""
    trajectories = [planned for group in manifest.groups for planned in group.trajectories]
    rows = [row for planned in trajectories for row in planned.sequences]
    num_tokens = sum(row.num_tokens for row in rows)
    num_turn_tokens = sum(planned.num_turn_tokens for planned in trajectories)
    num_positions = sum(cut.num_rows * cut.width for cut in manifest.mini_batches)
    oldest = [each.oldest_version for each in trajectories if each.oldest_version is not None]
    newest = [each.newest_version for each in trajectories if each.newest_version is not None]
    rewards = [planned.reward for planned in trajectories]
    return BatchNumbers(
        num_groups=len(manifest.groups),
        num_trajectories=len(trajectories),
        num_rows=len(rows),
        num_tokens=num_tokens,
        num_turn_tokens=num_turn_tokens,
        num_positions=num_positions,
        num_trained_tokens=sum(row.num_trained_tokens for row in rows),
        padding_share=ratio(num_positions - num_tokens, num_positions),
        merge_ratio=num_turn_tokens / num_tokens if num_tokens else 1.0,
        mean_reward=mean(rewards),
        oldest_version=min(oldest, default=None),
        newest_version=max(newest, default=None),
    )


def ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 without a whole."""
    return part / whole if whole else 0.0


def mean(rewards: Sequence[float]) -> float | None:
    """Return the mean; None without rewards."""
    return sum(rewards) / len(rewards) if rewards else None


MAX_PAGE_BYTES: Final = 4 << 20
"""Bytes of the plans of a page, but for its last one: they take a second to decode."""


def batch_facts(client: redis.Redis, run: str, step: int) -> dict[str, Any]:
    """Return a batch in plain values; a released batch has names and checksums.

    Raises:
        NotReadyError: the step is not planned yet.
        ReleasedError: the step is of the origin of a forked run, or an earlier release moved its
            record to a file.
    """
    frontier = read_frontier(client, run)
    stored = read_plan(client, run, step)
    past = None if stored else read_past_batch(client, run, step)
    if stored is not None:
        return {"state": state_of_step(step, frontier).value, **_content(stored)}
    if past is not None:
        return {"state": state_of_step(step, frontier).value, **_past_content(run, past)}
    origin = frontier.origin
    if origin is not None and step <= origin.step:
        raise ReleasedError(
            f"run {run!r}: step {step} was trained by its origin; see the batch in {origin.run!r}"
        )
    if step <= frontier.released and (lost := lost_records(client, run)):
        raise ReleasedError(f"run {run!r}: step {step} has no record: {lost}")
    raise NotReadyError(f"run {run!r}: step {step} is not planned; {frontier.planned} are")


def page_of_batches(
    client: redis.Redis, run: str, *, from_step: int, limit: int
) -> tuple[list[dict[str, Any]], int | None]:
    """Return batches from a step on without their trajectories, and the first step after them.

    There are at most `limit`, and fewer where plans are long. A released batch is left out.
    """
    frontier = read_frontier(client, run)
    page: list[dict[str, Any]] = []
    num_bytes = 0
    for stored in read_plans(client, run, first_step=from_step):
        manifest = stored.manifest
        if len(page) == limit or num_bytes > MAX_PAGE_BYTES:
            return page, manifest.step
        state = state_of_step(manifest.step, frontier).value
        num_mini_batches = len(manifest.mini_batches)
        page.append({"state": state, **_head(stored), "num_mini_batches": num_mini_batches})
        num_bytes += len(stored.record)
    return page, None


def reward_curve(client: redis.Redis, run: str) -> list[dict[str, Any]]:
    """Return `step` and `reward_mean` of each planned batch, released ones included, in order.

    Batches that an older release released have no mean reward, and are left out.
    """
    means = {past.step: past.mean_reward for past in past_batches(client, run)}
    for stored in read_plans(client, run):
        means[stored.manifest.step] = numbers_of(stored.manifest).mean_reward
    known = sorted((step, mean) for step, mean in means.items() if mean is not None)
    return [{"step": step, "reward_mean": mean} for step, mean in known]


def _past_content(run: str, past: CompactBatch) -> dict[str, Any]:
    return {
        "run": run,
        "step": past.step,
        "manifest_hash": past.manifest_hash,
        "lineage": past.lineage,
        "mean_reward": past.mean_reward,
        "trajectories": [
            {"id": keys.trajectory_id(key), "crc": f"{crc:08x}"}
            for key, crc in zip(past.trajectories, past.crcs, strict=True)
        ],
        "mini_batches": [],
    }


def _content(stored: StoredManifest) -> dict[str, Any]:
    manifest = stored.manifest
    return {
        **_head(stored),
        "figures": shown_figures(manifest.figures),
        "mini_batches": [_mini_batch(manifest, each) for each in manifest.mini_batches],
    }


def _head(stored: StoredManifest) -> dict[str, Any]:
    manifest = stored.manifest
    return {
        "run": manifest.run,
        "step": manifest.step,
        "revision": manifest.revision,
        "manifest_hash": stored.hash,
        "previous_hash": manifest.previous_hash,
        "lineage": manifest.lineage,
        "config_revision": manifest.config_revision,
        "numbers": asdict(numbers_of(manifest)),
    }


def _mini_batch(manifest: Manifest, cut: MiniBatchPlan) -> dict[str, Any]:
    groups = manifest.groups[cut.first_group : cut.first_group + cut.num_groups]
    return {
        "denominators": cut.denominators._asdict(),
        "num_rows": cut.num_rows,
        "first_row_id": cut.first_row_id,
        "trajectories": [
            {
                "id": keys.trajectory_id(member.key),
                "prompt_uid": group.prompt_uid,
                "status": member.status.value,
                "reward": member.reward,
                "advantage": member.advantage,
                "turn_advantages": list(member.turn_advantages),
                "weights": list(member.weights),
                "num_rows": len(member.sequences),
            }
            for group in groups
            for member in group.trajectories
        ],
    }


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
