"""Tags and metrics of single trajectories, from their seals: the plan has only their sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from turnstream.batching.merge.plan import TrajectoryPlan
from turnstream.errors import RecordError
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.client.replies import translating
from turnstream.types import SealedTrajectory

_SLICE: Final = 256


class Labels(NamedTuple):
    """The tags and metrics of one trajectory."""

    tags: Mapping[str, str]
    metrics: Mapping[str, float]


def read_labels(url: str, run: str, plans: Sequence[TrajectoryPlan]) -> dict[str, Labels]:
    """Return the labels of trajectories by id, except those with an unreadable seal."""
    found: dict[str, Labels] = {}
    with connect(url) as client, translating():
        for start in range(0, len(plans), _SLICE):
            some = plans[start : start + _SLICE]
            pipeline = client.pipeline(transaction=False)
            for plan in some:
                stream = keys.trajectory_keys(run, keys.trajectory_id(plan.key)).turns
                entry_id = f"0-{len(plan.payload_crcs) + 1}"  # the seal comes after the last turn
                pipeline.execute_command("XRANGE", stream, entry_id, entry_id)
            for plan, entries in zip(some, pipeline.execute(), strict=True):
                seal = _decode(entries)
                if seal is not None:
                    found[keys.trajectory_id(plan.key)] = Labels(seal.tags, seal.metrics)
    return found


def _decode(entries: Any) -> SealedTrajectory | None:
    try:
        ((_, fields),) = entries
        event = decode_event(fields[b"r"] if isinstance(fields, dict) else fields[1])
    except (RecordError, ValueError):
        return None
    return event if isinstance(event, SealedTrajectory) else None
