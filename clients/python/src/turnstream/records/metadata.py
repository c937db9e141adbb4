"""The description of a mini-batch as metadata of an Arrow schema.

Canonical: keys sorted, text unchanged, everything else as compact JSON with sorted keys. Unknown
keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import NoneType
from typing import Any, Final

from turnstream.errors import CorruptRecordError
from turnstream.records.framing import check_format
from turnstream.records.tag_statistics import figures_of_plain, plain_figures
from turnstream.types import Denominators, Figures, MiniBatchInfo

MAJOR_VERSION: Final = 0

_TEXTS: Final = ("run", "lineage", "manifest_hash")
_NUMBERS: Final[dict[str, tuple[type, ...]]] = {
    "step": (int,),
    "revision": (int,),
    "mini_batch": (int,),
    "num_mini_batches": (int,),
    "assembly_version": (int,),
    "config_revision": (int,),
    "padding_share": (float, int),
    "merge_ratio": (float, int),
    "oldest_version": (int, NoneType),
    "newest_version": (int, NoneType),
    "dp_rank": (int,),
    "dp_world_size": (int,),
    "num_real_rows": (int,),
    "num_inert_rows": (int,),
}
_LAYOUT: Final = ("width", "response_width", "pad_token_id", "alignment")


def encode_info(info: MiniBatchInfo) -> dict[bytes, bytes]:
    """Return the metadata, in order of key."""
    layout = {name: getattr(info, name) for name in _LAYOUT}
    values: dict[str, Any] = {
        "format": MAJOR_VERSION,
        **{name: getattr(info, name) for name in (*_TEXTS, *_NUMBERS)},
        "layout": {"side": "left", **layout},
        "denominators": info.denominators._asdict(),
        "micro_batches": info.micro_batches,
    }
    if info.figures:  # absent if empty, as in batches of older releases
        values["figures"] = plain_figures(info.figures)
    return {
        name.encode(): value.encode() if name in _TEXTS else _json(value)
        for name, value in sorted(values.items())
    }


def decode_info(metadata: Mapping[bytes, bytes]) -> MiniBatchInfo:
    """Return the description of a mini-batch from its metadata.

    Raises:
        CorruptRecordError: a key is missing, or its value is not of its kind.
        UnknownFormatError: another release wrote it.
    """
    try:
        version = json.loads(metadata[b"format"])
        check_format("mini-batch", version, newest=MAJOR_VERSION)
        layout = json.loads(metadata[b"layout"])
        return MiniBatchInfo(
            **{name: metadata[name.encode()].decode() for name in _TEXTS},
            **{
                name: _of_kind(json.loads(metadata[name.encode()]), kinds)
                for name, kinds in _NUMBERS.items()
            },
            **{name: _of_kind(layout[name], (int,)) for name in _LAYOUT},
            denominators=_denominators(json.loads(metadata[b"denominators"])),
            micro_batches=tuple(map(tuple, json.loads(metadata[b"micro_batches"]))),
            figures=_figures(metadata),
        )
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorruptRecordError(f"the metadata of a mini-batch: {error!r}") from error


def _of_kind(value: Any, kinds: tuple[type, ...]) -> Any:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError(value)
    return value


def _denominators(values: Mapping[str, Any]) -> Denominators:
    return Denominators(**{n: _of_kind(values[n], (int, float)) for n in Denominators._fields})


def _figures(metadata: Mapping[bytes, bytes]) -> Figures:
    stored = metadata.get(b"figures")
    return Figures() if stored is None else figures_of_plain(json.loads(stored))


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
