"""A planned batch, and the list of them, in plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import redis

from turnstream.batching.merge.plan import Manifest, MiniBatchPlan
from turnstream.errors import NotReadyError, ReleasedError
from turnstream.records.compact import CompactBatch
from turnstream.records.tag_statistics import shown_figures
from turnstream.store.client import keys
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.planning.manifests import StoredManifest, read_plan, read_plans
from turnstream_server.ledger.queries.batch_numbers import numbers_of
from turnstream_server.ledger.queries.ledger import state_of_step
from turnstream_server.ledger.release.compact_records import (
    lost_records,
    past_batches,
    read_past_batch,
)

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
