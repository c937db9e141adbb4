"""The words of commands: numbers in them, options that are not simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from simulator.values import Status, StoreError

Words = Sequence[bytes]
Command = Callable[[Any, Words], Any]
"""Gives the reply of a command: the store, its words."""

_NO_INTEGER = "ERR value is not an integer or out of range"
_NO_FLOAT = "ERR value is not a valid float"
OK = Status(b"OK")


class NotSimulatedError(NotImplementedError):
    """The store in memory does not have this; add it, and compare it with a real server."""


def integer(word: bytes) -> int:
    """The number that a word stands for."""
    digits = word[1:] if word[:1] == b"-" else word
    if not digits.isdigit():
        raise StoreError(_NO_INTEGER)
    return int(word)


def score_of(word: bytes) -> float:
    """The score that a word stands for."""
    try:
        number = float(word)
    except ValueError:
        raise StoreError(_NO_FLOAT) from None
    if number != number or word != word.strip() or b"_" in word:
        raise StoreError(_NO_FLOAT)
    return number


def shown(score: float) -> bytes:
    """A score as a server shows it."""
    if score == int(score) and abs(score) < 1e17:
        return b"%d" % score
    return b"%.17g" % score


def refuse_options(words: Words, start: int) -> None:
    """Raise where a command has more words."""
    if len(words) > start:
        raise NotSimulatedError(b" ".join(words).decode(errors="replace"))
