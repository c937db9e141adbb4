"""The description of a mini-batch as metadata of an Arrow schema.

Canonical: one key per field, sorted; text unchanged, everything else as compact JSON with sorted
keys. Unknown keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from turnstream.errors import CorruptRecordError
from turnstream.records.framing import check_format
from turnstream.records.values import field_names, read_value, to_plain
from turnstream.types import MiniBatchInfo

MAJOR_VERSION: Final = 0

_TEXTS: Final = ("run", "lineage", "manifest_hash")


def encode_info(info: MiniBatchInfo) -> dict[bytes, bytes]:
    """Return the metadata, in order of key."""
    values: dict[str, Any] = {"format": MAJOR_VERSION, **to_plain(info)}
    return {
        name.encode(): value.encode() if name in _TEXTS else _json(value)
        for name, value in sorted(values.items())
    }


def decode_info(metadata: Mapping[bytes, bytes]) -> MiniBatchInfo:
    """Return the description of a mini-batch from its metadata."""
    try:
        check_format("mini-batch", json.loads(metadata[b"format"]), newest=MAJOR_VERSION)
        stored = {name: metadata[name.encode()] for name in field_names(MiniBatchInfo)}
        values = {
            name: value.decode() if name in _TEXTS else json.loads(value)
            for name, value in stored.items()
        }
        return read_value(MiniBatchInfo, values)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorruptRecordError(f"the metadata of a mini-batch: {error!r}") from error


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
