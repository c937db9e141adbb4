"""Models and checkpoints as the SDK reads them, and pages of lists."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import Query

from turnstream_server.operations.checkpoints import SavedCheckpoint
from turnstream_server.operations.models import ModelRecord

_MAX_PAGE: Final = 1_000

Limit = Annotated[int, Query(ge=0, le=_MAX_PAGE)]
Offset = Annotated[int, Query(ge=0)]

_TYPES: Final = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


def describe_checkpoint(saved: SavedCheckpoint) -> dict[str, Any]:
    """Return a checkpoint as the SDK reads it."""
    return {
        "checkpoint_id": f"{saved.path.kind}/{saved.path.name}",
        "checkpoint_type": _TYPES[saved.path.kind],
        "time": timestamp(saved.created_ms),
        "tinker_path": str(saved.path),
        "size_bytes": saved.size_bytes,
        "public": saved.public,
        "user_metadata": text_values(saved.user_metadata),
        "expires_at": None if saved.expires_ms is None else timestamp(saved.expires_ms),
    }


def describe_model(model: ModelRecord, checkpoints: Iterable[SavedCheckpoint]) -> dict[str, Any]:
    """Return a model as the SDK reads it; the checkpoints are those of its owner, oldest first."""
    newest = {each.path.kind: each for each in checkpoints if each.path.model_id == model.model_id}
    last = {kind: describe_checkpoint(each) for kind, each in newest.items()}
    return {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": model.owner,
        "is_lora": model.is_lora,
        "corrupted": False,
        "lora_rank": model.lora_rank or None,
        "last_request_time": timestamp(model.last_request_ms),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": text_values(model.user_metadata),
    }


def cursor(*, offset: int, limit: int, total: int) -> dict[str, int]:
    """Return the place of a page in its list."""
    return {"offset": offset, "limit": limit, "total_count": total}


def text_values(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return metadata with texts as values, which the SDK requires.

    >>> text_values({"a": "x", "b": [1]})
    {'a': 'x', 'b': '[1]'}
    """
    if metadata is None:
        return None
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in metadata.items()
    }


def timestamp(server_ms: int) -> str:
    """Return server milliseconds as ISO 8601.

    >>> timestamp(1_500)
    '1970-01-01T00:00:01.500000+00:00'
    """
    return datetime.fromtimestamp(server_ms / 1000, UTC).isoformat(timespec="microseconds")
