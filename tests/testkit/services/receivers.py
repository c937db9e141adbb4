"""Reads the files of receivers of metrics."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

_WANDB_HEADER_BYTES = 7
_LEVELDB_HEADER = struct.Struct("<IHB")


def tensorboard_scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return (step, value) of a tag in a folder of event files, as TensorBoard shows them."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def tensorboard_tags(folder: Path) -> set[str]:
    """Return the tags of all scalars in a folder of event files."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return set(accumulator.Tags()["scalars"])


def wandb_records(folder: Path) -> list[Any]:
    """Return the records of all offline runs of wandb in a folder, in order.

    The files have the log format of LevelDB: a header, and records of CRC, length, type and bytes.
    Files above one block of 32 KiB are not understood.
    """
    records: list[Any] = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data = path.read_bytes()
        assert len(data) < 1 << 15
        position = _WANDB_HEADER_BYTES
        while position + _LEVELDB_HEADER.size <= len(data):
            _, length, _ = _LEVELDB_HEADER.unpack_from(data, position)
            position += _LEVELDB_HEADER.size
            record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
            record.ParseFromString(data[position : position + length])
            records.append(record)
            position += length
    return records


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Return what was logged to the offline runs of wandb in a folder, call by call."""
    return [
        {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(folder)
        if record.WhichOneof("record_type") == "history"
    ]
