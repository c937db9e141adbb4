"""Columns of reasons: each costs what is new in it.

A text is a template and its words with a digit, which stand in columns of their own::

    judge did not answer in 30 s (request 8f3a1b2c)      judge did not answer in _ s (request _)
    judge did not answer in 30 s (request 07d1e9aa)        30 30      8f3a1b2c 07d1e9aa

Columns of eight hex digits that do not repeat, as ids have them, do not compress: they are numbers
of four bytes in an array.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from turnstream.errors import CorruptRecordError
from turnstream.records.columns import ColumnReader, ColumnWriter

_HOLE: Final = "\0"
_WORD: Final = re.compile(r"([0-9A-Za-z]*[0-9][0-9A-Za-z]*)", re.ASCII)
_HEX: Final = re.compile(r"[0-9a-f]{8}", re.ASCII)
_AS_TEXT: Final = 0
_IN_ARRAY: Final = 1
"""Kinds of a column."""

_SHOWN: Final = 8
_UUID: Final = re.compile(r"\b([0-9A-Fa-f]{8})(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b", re.ASCII)
_CHANGE: Final = re.compile(r"[0-9](?=[A-Za-z])|[A-Za-z](?=[0-9])", re.ASCII)
_FEW_CHANGES: Final = 2
"""From digits to letters or back: "generator12" has one, and "a100x" two; ids have more."""


def brief(reason: str) -> str:
    """A reason in which every id, a long word of letters and digits by turns, is its beginning.

    That is enough to find it in a log, and its rest would cost as much as all else that is kept.

    >>> brief("judge did not answer in 30 s (request 8f3a1b2c77d0e1f2)")
    'judge did not answer in 30 s (request 8f3a1b2c…)'
    """
    return _WORD.sub(_beginning, _UUID.sub(r"\1…", reason))


def _beginning(found: re.Match[str]) -> str:
    word = found[0]
    is_id = len(word) > _SHOWN and len(_CHANGE.findall(word)) > _FEW_CHANGES
    return f"{word[:_SHOWN]}…" if is_id else word


def write_reasons(columns: ColumnWriter, texts: Sequence[str]) -> list[int]:
    """Write texts, each of them different; the numbers of the array that belongs to them."""
    parts = [_take_apart(text) for text in texts]
    words_of: dict[str, list[list[str]]] = {}
    for template, words in parts:
        words_of.setdefault(template, []).append(words)
    index_of = {template: index for index, template in enumerate(words_of)}
    columns.number(len(words_of))
    for template in words_of:
        columns.text(template)
    columns.number(len(texts))
    for template, _ in parts:
        columns.number(index_of[template])
    return [
        number
        for rows in words_of.values()
        for words in zip(*rows, strict=True)
        for number in _write_words(columns, words)
    ]


def read_reasons(columns: ColumnReader, array: Sequence[int]) -> list[str]:
    """The texts that `write_reasons` wrote, in order.

    Raises:
        CorruptRecordError: the columns contradict themselves or the array.
    """
    templates = [columns.text() for _ in range(columns.number())]
    indices = [columns.number() for _ in range(columns.number())]
    if any(index >= len(templates) for index in indices):
        raise CorruptRecordError("a compact record names a reason that it lacks")
    numbers = iter(array)
    texts: list[Iterator[str]] = []
    for index, template in enumerate(templates):
        size = indices.count(index)
        words = [_read_words(columns, size, numbers) for _ in range(template.count(_HOLE))]
        rows = zip(*words, strict=True) if words else [()] * size
        texts.append(iter([_put_together(template, row) for row in rows]))
    if next(numbers, None) is not None:
        raise CorruptRecordError("the array of a compact record has numbers of no reason")
    return [next(texts[index]) for index in indices]


def _take_apart(text: str) -> tuple[str, list[str]]:
    if _HOLE in text:
        return _HOLE, [text]
    parts = _WORD.split(text)  # what is between, and words with a digit, by turns
    return _HOLE.join(parts[::2]), parts[1::2]


def _put_together(template: str, words: Sequence[str]) -> str:
    between = template.split(_HOLE)
    return between[0] + "".join(
        f"{word}{text}" for word, text in zip(words, between[1:], strict=True)
    )


def _write_words(columns: ColumnWriter, words: Sequence[str]) -> list[int]:
    """Words as texts, unless they are ids; the numbers of these."""
    if all(map(_HEX.fullmatch, words)) and 2 * len(set(words)) > len(words):
        columns.number(_IN_ARRAY)
        return [int(word, 16) for word in words]
    columns.number(_AS_TEXT)
    for word in words:
        columns.text(word)
    return []


def _read_words(columns: ColumnReader, size: int, numbers: Iterator[int]) -> list[str]:
    if columns.number() == _AS_TEXT:
        return [columns.text() for _ in range(size)]
    words = [f"{number:08x}" for _, number in zip(range(size), numbers, strict=False)]
    if len(words) < size:
        raise CorruptRecordError("the array of a compact record is cut short")
    return words
