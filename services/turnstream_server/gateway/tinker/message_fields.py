"""The number of fields of a protobuf message, counted before the message is built."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from turnstream.errors import RecordError

MAX_FIELDS: Final = 1 << 17
"""Fields of one message and its parts: a training call of the SDK has up to 40,000."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}
_VARINT_BYTES: Final = 10
_NOT_PACKED: Final = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)


def check_fields(body: bytes, kind: Any, *, most: int = MAX_FIELDS) -> None:
    """Raise RecordError for a message with too many fields, or one that is damaged.

    Two bytes make a part, which takes a hundred in memory. `kind` is the descriptor.
    """
    num_fields, is_whole = 0, True
    parts = [(0, len(body), kind)]
    try:
        while parts:
            position, stop, part = parts.pop()
            while position < stop:
                tag, position = _varint(body, position)
                field, wire_type = part.fields_by_number.get(tag >> 3), tag & 7
                num_fields += 1
                size = _FIXED_BYTES.get(wire_type, 0)
                if wire_type == _VARINT:
                    _, position = _varint(body, position)
                elif wire_type == _BYTES:
                    size, position = _varint(body, position)
                    if field is not None and field.message_type is not None:
                        parts.append((position, position + size, field.message_type))
                    elif field is not None and field.is_repeated and field.type not in _NOT_PACKED:
                        num_fields += size  # packed numbers, of at least one byte
                position += size
                if num_fields > most:
                    raise RecordError(f"the body has more than {most} fields: send less")
            is_whole = is_whole and position == stop
    except IndexError:
        is_whole = False
    if not is_whole:
        raise RecordError(f"the body is no {kind.name}: a field is cut off, or has no end")


def _varint(body: bytes, position: int) -> tuple[int, int]:
    """Return a number of at most 64 bits, and the position after it; IndexError for another one."""
    value = 0
    for place in range(_VARINT_BYTES):
        byte = body[position + place]
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value, position + place + 1
    raise IndexError(position)
