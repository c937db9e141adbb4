"""Why a step is not planned yet, in the words of the planner that leads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import WaitingGroup
from turnstream.batching.fold.readiness import RunFold

_MAX_NAMED: Final = 8


def why_not_complete(fold: RunFold, config: BatchingConfig) -> str:
    """How many groups the next batch has, and what the oldest of the others waits for.

    "3 of 4 groups complete, 2 open; group g7, open since .."
    """
    reason = f"{fold.num_ready} of {config.batch_groups} groups complete, "
    reason += f"{fold.num_open_groups} open"
    oldest = next(fold.waiting(), None)
    return f"{reason}; {_describe(oldest)}" if oldest else reason


def _describe(group: WaitingGroup) -> str:
    """Describe a group that is waited for.

    "group g7, open since 2026-03-01 12:00:00 UTC, has 2 of 4 members; sample 1, 3 may still come"
    """
    opened_s = int(group.opened_by.partition("-")[0]) / 1000
    since = datetime.fromtimestamp(opened_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    has = f"has {group.num_members} of {group.num_needed} members"
    parts = [f"group {group.group_id}, open since {since}, {has}"]
    awaited = {key.sample for key in group.awaiting}
    hanging = [sample for sample in group.samples if sample not in awaited]
    if hanging:
        parts.append(f"sample {_listed(hanging)} may still come")
    if awaited:
        parts.append(f"the reward of sample {_listed(sorted(awaited))} was not posted")
    if group.num_refills:
        parts.append(f"{group.num_refills} refills were asked for")
    return "; ".join(parts)


def _listed(samples: Sequence[int]) -> str:
    named = ", ".join(map(str, samples[:_MAX_NAMED]))
    return f"{named} and {len(samples) - _MAX_NAMED} more" if samples[_MAX_NAMED:] else named
