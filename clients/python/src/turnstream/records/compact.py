"""Compact records of finished trajectories: their names, and a checksum or a reason of each.

The header is compressed JSON of named columns. A batch has its checksums as the array, because they
do not compress. Example of the columns of a batch::

    {"step": 7, "manifest_hash": "9f3c...", "lineage": "main",
     "groups": ["maze-17", "maze-18"], "members": [4, [0, 0, 1, 2]]}

`members` is the number of a group's members if they are the first attempts of samples 0, 1, ...;
otherwise sample and attempt of each.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np

from turnstream.batching.merge.plan import Manifest
from turnstream.errors import CorruptRecordError, UnknownFormatError
from turnstream.records.encoding import (
    COMPACT,
    COMPACT_VERSION,
    ENDS,
    read_frame,
    reading,
    write_frame,
)
from turnstream.types import TrajectoryKey

_KEY_COLUMNS: Final = {"groups", "members"}
_BATCH: Final = ("step", "manifest_hash", "lineage")
_MEAN_REWARD: Final = "mean_reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactBatch:
    """A finished batch.

    Attributes:
        crcs: one per trajectory, see `trajectory_crc`.
        mean_reward: mean planned reward; None without a trajectory, and in older records.
    """

    step: int
    manifest_hash: str
    lineage: str
    trajectories: tuple[TrajectoryKey, ...]
    crcs: tuple[int, ...]
    mean_reward: float | None = None


def compact_batch(manifest: Manifest, *, manifest_hash: str) -> CompactBatch:
    """Return the compact form of a batch."""
    members = [member for group in manifest.groups for member in group.trajectories]
    return CompactBatch(
        step=manifest.step,
        manifest_hash=manifest_hash,
        lineage=manifest.lineage,
        trajectories=tuple(member.key for member in members),
        crcs=tuple(trajectory_crc(member.payload_crcs) for member in members),
        mean_reward=math.fsum(e.reward for e in members) / len(members) if members else None,
    )


def trajectory_crc(payload_crcs: Sequence[int]) -> int:
    """Return one CRC-32 of the CRCs of all turns, each as four little-endian bytes."""
    return zlib.crc32(struct.pack(f"<{len(payload_crcs)}I", *payload_crcs))


def encode_batch(batch: CompactBatch) -> bytes:
    """Return the record of a batch; the same batch always has the same bytes."""
    columns = {name: getattr(batch, name) for name in _BATCH} | _key_columns(batch.trajectories)
    if batch.mean_reward is not None:
        columns[_MEAN_REWARD] = batch.mean_reward
    return write_frame(COMPACT, _packed(columns), [np.array(batch.crcs, "<u4")])


def decode_batch(record: bytes) -> CompactBatch:
    """Return the batch of a record."""
    columns, array = _unpacked(record, kind=COMPACT, known={*_BATCH}, optional={_MEAN_REWARD})
    trajectories = _keys(columns)
    if 4 * len(trajectories) != len(array):
        raise CorruptRecordError(
            f"{len(trajectories)} trajectories of a batch have {len(array)} bytes of CRCs"
        )
    return CompactBatch(
        **{name: columns[name] for name in _BATCH},
        trajectories=trajectories,
        crcs=tuple(np.frombuffer(array, "<u4").tolist()),
        mean_reward=columns.get(_MEAN_REWARD),
    )


def encode_ends(ends: Mapping[TrajectoryKey, str]) -> bytes:
    """Return the record of trajectories that ended untrained, with "<state>:<reason>" of each."""
    table = {end: index for index, end in enumerate(dict.fromkeys(ends.values()))}
    columns = {
        **_key_columns(ends),
        "reasons": [*table],
        "ends": [table[end] for end in ends.values()],
    }
    return write_frame(ENDS, _packed(columns))


def decode_ends(record: bytes) -> dict[TrajectoryKey, str]:
    """Return "<state>:<reason>" of the trajectories of a record."""
    columns, array = _unpacked(record, kind=ENDS, known={"reasons", "ends"})
    trajectories, table = _keys(columns), columns["reasons"]
    if array or len(columns["ends"]) != len(trajectories):
        raise CorruptRecordError("the ends of a compact record are not those of its trajectories")
    with reading("a compact record names a reason that it lacks"):
        return dict(zip(trajectories, [table[i] for i in columns["ends"]], strict=True))


def names_group(record: bytes, group_id: str) -> bool:
    """Return whether a record of either kind may name trajectories of a group; False is certain.

    The names are unpacked and not parsed: decoding takes 30 times as long.
    """
    kind = COMPACT if record[2:3] == COMPACT else ENDS
    frame = read_frame(record, kind=kind)
    with reading("a compact record does not unpack"):
        return _json(group_id) in zlib.decompress(frame.header)


def _key_columns(keys: Iterable[TrajectoryKey]) -> dict[str, Any]:
    groups = [(name, list(members)) for name, members in groupby(keys, key=lambda key: key[0])]
    return {
        "groups": [name for name, _ in groups],
        "members": [_members(members) for _, members in groups],
    }


def _members(members: Sequence[TrajectoryKey]) -> int | list[int]:
    if all(key[1:] == (sample, 0) for sample, key in enumerate(members)):
        return len(members)
    return [number for key in members for number in key[1:]]


def _keys(columns: Mapping[str, Any]) -> tuple[TrajectoryKey, ...]:
    keys: list[TrajectoryKey] = []
    with reading("the names of a compact record"):
        for name, members in zip(columns["groups"], columns["members"], strict=True):
            if isinstance(members, int):
                keys += [TrajectoryKey(name, sample) for sample in range(members)]
            else:
                pairs = zip(members[::2], members[1::2], strict=True)
                keys += [TrajectoryKey(name, sample, attempt) for sample, attempt in pairs]
    return tuple(keys)


def _packed(columns: Mapping[str, Any]) -> bytes:
    return zlib.compress(_json(columns), 9)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _unpacked(
    record: bytes, *, kind: bytes, known: set[str], optional: Set[str] = frozenset()
) -> tuple[dict[str, Any], bytes]:
    """Return columns and array of a record; they have the known names, and may have optional."""
    frame = read_frame(record, kind=kind)
    known = known | _KEY_COLUMNS
    with reading("a compact record does not unpack"):
        columns: Any = json.loads(zlib.decompress(frame.header))
        unknown = sorted(columns.keys() - known - optional)
        if unknown:
            part = ", ".join(unknown)
            raise UnknownFormatError("compact", COMPACT_VERSION, COMPACT_VERSION, part)
        missing = sorted(known - columns.keys())
    if missing:
        raise CorruptRecordError(f"a compact record lacks {', '.join(missing)}")
    return columns, record[frame.body_start : frame.body_stop]
