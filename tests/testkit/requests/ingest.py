"""Requests to the ingest routes, from the values that the SDK takes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Self

import httpx2
import numpy as np
import pyarrow as pa

from testkit.services.gateway_thread import GatewayThread
from turnstream.types import Group, Trajectory, Turn

ARROW = "application/vnd.apache.arrow.stream"
ARROW_TYPES: dict[str, pa.DataType] = {
    "group_id": pa.string(),
    "sample": pa.int32(),
    "attempt": pa.int32(),
    "num_samples": pa.int32(),
    "num_needed": pa.int32(),
    "prompt_uid": pa.string(),
    "purpose": pa.string(),
    "samples": pa.list_(pa.int32()),
    "prompt_ids": pa.list_(pa.int32()),
    "response_ids": pa.list_(pa.int64()),
    "logprobs": pa.list_(pa.float32()),
    "loss_mask": pa.list_(pa.uint8()),
    "token_weights": pa.list_(pa.float32()),
    "rewards": pa.list_(pa.float32()),
    "version_runs": pa.list_(pa.struct({"version": pa.int64(), "num_tokens": pa.int32()})),
    "anchor": pa.string(),
    "call_id": pa.string(),
    "extras.state": pa.list_(pa.float32()),
    "reward": pa.float64(),
    "reward_components": pa.map_(pa.string(), pa.float64()),
    "status": pa.string(),
    "sampling": pa.map_(pa.string(), pa.float64()),
    "tags": pa.map_(pa.string(), pa.string()),
    "metrics": pa.map_(pa.string(), pa.float64()),
    "awaits_reward": pa.bool_(),
    "siblings": pa.string(),
    "turn": pa.int32(),
    "seal": pa.bool_(),
}


class IngestClient:
    """A client of one run; without a `writer`, its name is that of the key."""

    def __init__(
        self, gateway: GatewayThread | str, run: str, *, writer: str | None = "test"
    ) -> None:
        base_url = gateway if isinstance(gateway, str) else gateway.base_url
        headers = {} if writer is None else {"X-Turnstream-Writer": writer}
        self.run = run
        self.http = httpx2.Client(base_url=f"{base_url}/v1/", headers=headers, timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()

    def post(self, route: str, *items: Mapping[str, Any], **headers: str) -> httpx2.Response:
        """Return the response to items in JSON."""
        return self.http.post(f"runs/{self.run}/{route}", json={"items": items}, headers=headers)

    def send(self, route: str, body: bytes, **headers: str) -> httpx2.Response:
        """Return the response to a body; `content_type` and others are headers."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named.setdefault("content-type", "application/json")
        return self.http.post(f"runs/{self.run}/{route}", content=body, headers=named)

    def results(self, route: str, *items: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the results of items."""
        return results_of(self.post(route, *items))

    def turn(self, number: int, sent: Turn | None = None, **fields: Any) -> dict[str, Any]:
        """Return the result of one turn of sample 0 of group "g"."""
        item = {"group_id": "g", "sample": 0, "num_samples": 1, "turn": number}
        values = {} if sent is None else turn_fields(sent)
        (result,) = self.results("turns", {**item, **values, **fields})
        return result


def results_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """Return the results of an accepted request."""
    assert response.status_code == 200, response.text
    return response.json()["results"]


def turn_fields(turn: Turn) -> dict[str, Any]:
    """Return the fields of a turn in JSON."""
    arrays = ("prompt_ids", "response_ids", "logprobs", "loss_mask", "token_weights", "rewards")
    fields: dict[str, Any] = {
        name: getattr(turn, name).tolist() for name in arrays if getattr(turn, name) is not None
    }
    if turn.version_runs:
        fields["version_runs"] = [run._asdict() for run in turn.version_runs]
    if turn.extras:
        fields["extras"] = {name: np.asarray(v).tolist() for name, v in turn.extras.items()}
    if turn.anchor is not None:
        fields["anchor"] = turn.anchor
    if turn.call_id is not None:
        fields["call_id"] = turn.call_id
    return fields


def seal_fields(trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of a seal in JSON."""
    return {
        "reward": trajectory.reward,
        "reward_components": dict(trajectory.reward_components),
        "status": trajectory.status.value,
        "sampling": dict(trajectory.sampling),
        "tags": dict(trajectory.tags),
        "metrics": dict(trajectory.metrics),
        "awaits_reward": trajectory.awaits_reward,
        "siblings": trajectory.siblings,
    }


def member_fields(group: Group, trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields that name a trajectory and its group."""
    return {
        "group_id": group.group_id,
        "sample": trajectory.sample,
        "attempt": trajectory.attempt,
        "num_samples": len(group.trajectories),
        "prompt_uid": group.prompt_uid,
    }


def trajectory_items(group: Group) -> list[dict[str, Any]]:
    """Return the items of a whole group."""
    return [
        {
            **member_fields(group, each),
            **seal_fields(each),
            "turns": [turn_fields(turn) for turn in each.turns],
        }
        for each in group.trajectories
    ]


def turn_items(group: Group) -> list[dict[str, Any]]:
    """Return an item per turn of a group; the last one of each trajectory has its seal."""
    items: list[dict[str, Any]] = []
    for each in group.trajectories:
        for number, turn in enumerate(each.turns):
            items.append({**member_fields(group, each), "turn": number, **turn_fields(turn)})
        items[-1]["seal"] = seal_fields(each)
    return items


def arrow_rows(group: Group) -> list[dict[str, Any]]:
    """Return a row per turn of a group."""
    rows: list[dict[str, Any]] = []
    for each in group.trajectories:
        seal = seal_fields(each)
        for name in ("reward_components", "sampling", "tags", "metrics"):
            seal[name] = list(seal[name].items())
        for turn in each.turns:
            fields = turn_fields(turn)
            extras = fields.pop("extras", {})
            flat = {f"extras.{name}": np.ravel(values) for name, values in extras.items()}
            rows.append({**member_fields(group, each), **fields, **flat})
        rows[-1].update(seal)
    return rows


def arrow_turns(group: Group) -> list[dict[str, Any]]:
    """Return a row per turn of a group, for the route of single turns."""
    numbers = [number for each in group.trajectories for number, _ in enumerate(each.turns)]
    return [
        {**row, "turn": number, "seal": "status" in row}
        for row, number in zip(arrow_rows(group), numbers, strict=True)
    ]


def arrow_body(
    rows: Sequence[Mapping[str, Any]],
    types: Mapping[str, pa.DataType] = ARROW_TYPES,
    *,
    options: pa.ipc.IpcWriteOptions | None = None,
) -> bytes:
    """Return rows as an Arrow IPC stream, with the columns that any row has."""
    names = [name for name in types if any(name in row for row in rows)]
    schema = pa.schema({name: types[name] for name in names})
    arrays = [pa.array([row.get(name) for row in rows], types[name]) for name in names]
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    return sink.getvalue()
