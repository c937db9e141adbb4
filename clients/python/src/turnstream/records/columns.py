"""Numbers and texts one after the other, as the header of a compact record has them."""

from __future__ import annotations

from turnstream.errors import CorruptRecordError


class ColumnWriter:
    """Appends numbers and texts to `data`."""

    def __init__(self) -> None:
        self.data = bytearray()

    def number(self, value: int) -> None:
        """Append a number that is not negative: seven bits a byte, the lowest first."""
        while value > 0x7F:
            self.data.append(value & 0x7F | 0x80)
            value >>= 7
        self.data.append(value)

    def difference(self, value: int) -> None:
        """Append a number of either sign; small ones take one byte."""
        self.number(value * 2 if value >= 0 else -value * 2 - 1)

    def text(self, value: str) -> None:
        """Append a text behind its length in bytes."""
        encoded = value.encode()
        self.number(len(encoded))
        self.data += encoded


class ColumnReader:
    """What a `ColumnWriter` wrote.

    Every method raises CorruptRecordError where the bytes end too early.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def number(self) -> int:
        """The next number."""
        value = shift = 0
        while True:
            if self._position >= len(self._data):
                raise CorruptRecordError("a compact record is cut short")
            byte = self._data[self._position]
            self._position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def difference(self) -> int:
        """The next number of either sign."""
        value = self.number()
        return -(value + 1) // 2 if value & 1 else value // 2

    def text(self) -> str:
        """The next text."""
        stop = self.number() + self._position
        encoded = self._data[self._position : stop]
        if stop > len(self._data):
            raise CorruptRecordError("a compact record is cut short")
        self._position = stop
        try:
            return encoded.decode()
        except UnicodeDecodeError as error:
            raise CorruptRecordError(f"a text of a compact record: {error}") from error
