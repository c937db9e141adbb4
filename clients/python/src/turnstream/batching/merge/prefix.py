"""The earlier turn whose row a prompt continues, or that holds its longest beginning.

A prompt continues the longest row that it holds whole and that no turn continued. Among equal
rows, it continues the newest. Without such a row, the longest known beginning is not sent again.

The tokens of all turns form a tree of *lines*: stretches of tokens in one buffer each, which grow
at their end. A line begins where its first token differs, at an anchor in its parent line. With one
letter per token, the prompts and responses `ab|cd`, `abcde|f`, `abx|y` are two lines::

    a b c d e f        written by turn 0 (abcd) and turn 1 (ef)
        x y            anchored after "ab", written by turn 2
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import InvalidTurnError
from turnstream.types import NO_PARENT

_TOKEN_BYTES = 4
_INT32 = np.dtype(np.int32)
_NO_BYTES = memoryview(b"")

_FIRST_BLOCK = 1024
"""Tokens compared at first. Each further block is 8 times longer, so linking stays linear."""


class PrefixMatch(NamedTuple):
    """The first `shared_tokens` tokens of a prompt are those of `parent_turn`.

    `parent_turn` is NO_PARENT where nothing is shared, unless it continues a row without a token.
    """

    parent_turn: int
    shared_tokens: int


_NO_MATCH = PrefixMatch(NO_PARENT, 0)
NO_MATCHES = (_NO_MATCH,)
"""The matches of a first turn."""


class PrefixIndex:
    """The tokens of a trajectory's turns, for finding the longest known beginning of the next.

    Turns are numbered from 0 in the order of `add`. Memory: the tokens that are new in each
    turn.
    """

    def __init__(self) -> None:
        self._root = _Line(None, 0)
        self._ends: list[tuple[_Line, int]] = []
        # (line, offset, first token) -> the line that branches off there. References between lines
        # would be circles, whose memory is not freed at once.
        self._branches: dict[tuple[_Line, int, bytes], _Line] = {}

    def matches(self, prompt_ids: NDArray[np.int32]) -> Iterator[PrefixMatch]:
        """Return the possible parents of the next turn, the best first, until a turn is added.

        First come the rows that the prompt holds whole, the longest first, of equal ones the
        newest. Last comes the longest beginning, with the lowest turn that ends there, else the
        lowest that holds it.
        """
        require_int32(prompt_ids, field="prompt_ids")
        if not self._ends:
            return iter(NO_MATCHES)
        line, offset = self._find(_bytes_of(prompt_ids))
        shared = line.depth + offset
        longest = PrefixMatch(line.turn_at(offset), shared) if shared else _NO_MATCH
        return itertools.chain(line.open_rows(offset), (longest,))

    def add(
        self,
        match: PrefixMatch,
        prompt_ids: NDArray[np.int32],
        response_ids: NDArray[np.int32],
    ) -> None:
        """Add the next turn, with one of its `matches` or a shorter one; new tokens are copied."""
        require_int32(response_ids, field="response_ids")
        new_ids = _bytes_of(prompt_ids[match.shared_tokens :])
        line, offset, known = self._walk(*self._locate(match), new_ids)
        self._remember(line, offset, new_ids[known * _TOKEN_BYTES :], response_ids, match=match)

    def _find(self, prompt: memoryview) -> tuple[_Line, int]:
        """Return the last place in the tree that agrees with a prompt."""
        line, end = self._ends[-1] if self._root.length else (self._root, 0)
        length = len(line.tokens)
        is_usual = 0 < end == line.length and line.depth == 0 and length <= len(prompt)
        if is_usual and line.tokens.startswith(prompt[:length]):
            # One comparison of memory: it continues the last turn.
            return line, end
        line, offset, _ = self._walk(self._root, 0, prompt)
        return line, offset

    def _remember(
        self,
        line: _Line,
        offset: int,
        new_ids: memoryview,
        response_ids: NDArray[np.int32],
        *,
        match: PrefixMatch,
    ) -> None:
        turn = len(self._ends)
        response = _bytes_of(response_ids)
        if not new_ids:
            # The response may repeat what another turn went on with: best-of-n samples often do.
            line, offset, known = self._walk(line, offset, response)
            response = response[known * _TOKEN_BYTES :]
        if new_ids or response:
            if offset < line.length:
                first = bytes((new_ids or response)[:_TOKEN_BYTES])
                branch = _Line(line, line.depth + offset)
                self._branches[line, offset, first] = branch
                line = branch
            offset = line.write(new_ids, response, turn=turn)
        if match.parent_turn != NO_PARENT:
            parent_line, end = self._ends[match.parent_turn]
            if match.shared_tokens == parent_line.depth + end:
                parent_line.continue_row(end, match.parent_turn)
        line.end(offset, turn)
        self._ends.append((line, offset))

    def _locate(self, match: PrefixMatch) -> tuple[_Line, int]:
        if match.shared_tokens == 0:
            return self._root, 0
        line, _ = self._ends[match.parent_turn]
        while line.parent is not None and line.depth >= match.shared_tokens:
            line = line.parent
        return line, match.shared_tokens - line.depth

    def _walk(self, line: _Line, offset: int, tokens: memoryview) -> tuple[_Line, int, int]:
        """Follow tokens from a place in the tree; return their last place and how many follow."""
        known = 0
        if offset == line.length:  # the usual case: nothing follows there
            return line, offset, known
        num_tokens = len(tokens) // _TOKEN_BYTES
        while True:
            same = line.num_same(offset, tokens, known)
            offset += same
            known += same
            if known == num_tokens or offset == line.length:
                return line, offset, known
            first = known * _TOKEN_BYTES
            branch = self._branches.get((line, offset, bytes(tokens[first : first + _TOKEN_BYTES])))
            if branch is None:
                return line, offset, known
            line, offset = branch, 0


class _Line:
    """A stretch of tokens: `depth` tokens come before it on the path from the root.

    Attributes:
        length: in tokens.
        tokens: int32 each, as bytes: one call compares them.
        writes: (offset, turn): the turn wrote the tokens from there on.
        ends: offset -> the lowest turn that ends there.
        rows: (offset, turn), ascending: ends of rows that no turn has continued.
    """

    __slots__ = ("depth", "ends", "length", "parent", "rows", "tokens", "writes")

    def __init__(self, parent: _Line | None, depth: int) -> None:
        self.parent = parent
        self.depth = depth
        self.length = 0
        self.tokens = bytearray()
        self.writes: list[tuple[int, int]] = []
        self.ends: dict[int, int] = {}
        self.rows: list[tuple[int, int]] = []

    def end(self, offset: int, turn: int) -> None:
        """Add a row that ends here with this turn, the newest of all."""
        self.ends.setdefault(offset, turn)
        if not self.rows or self.rows[-1] < (offset, turn):
            self.rows.append((offset, turn))
        else:
            bisect.insort(self.rows, (offset, turn))

    def continue_row(self, offset: int, turn: int) -> None:
        """Continue the row that ended here with this turn, unless it is continued already."""
        if self.rows[-1:] == [(offset, turn)]:
            self.rows.pop()
            return
        place = bisect.bisect_left(self.rows, (offset, turn))
        if self.rows[place : place + 1] == [(offset, turn)]:
            del self.rows[place]

    def open_rows(self, offset: int) -> Iterator[PrefixMatch]:
        """Yield the rows that end on the way from the root to here, the last first."""
        line = self
        while True:
            for place in reversed(range(bisect.bisect_left(line.rows, (offset + 1,)))):
                end, turn = line.rows[place]
                yield PrefixMatch(turn, line.depth + end)
            if line.parent is None:
                return
            line, offset = line.parent, line.depth - line.parent.depth

    def turn_at(self, offset: int) -> int:
        """Return the lowest turn that ends at this offset > 0, else the writer before it."""
        ending = self.ends.get(offset)
        if ending is not None:
            return ending
        return self.writes[bisect.bisect_left(self.writes, (offset,)) - 1][1]

    def write(self, *pieces: memoryview, turn: int) -> int:
        """Append tokens after the last one; return where the new ones end."""
        self.writes.append((self.length, turn))
        if self.length:
            self.tokens += b"".join(pieces)
        else:
            self.tokens = bytearray().join(pieces)
        self.length = len(self.tokens) // _TOKEN_BYTES
        return self.length

    def num_same(self, offset: int, tokens: memoryview, known: int) -> int:
        """Return how many tokens agree: the line's from `offset`, the given from `known`."""
        length = min(self.length - offset, len(tokens) // _TOKEN_BYTES - known)
        here, there = offset * _TOKEN_BYTES, known * _TOKEN_BYTES
        if not self.tokens.startswith(tokens[there : there + _TOKEN_BYTES], here):
            return 0
        if self.tokens.startswith(tokens[there : there + length * _TOKEN_BYTES], here):
            return length
        left = np.frombuffer(self.tokens, np.int32, length, here)
        right = np.frombuffer(tokens, np.int32, length, there)
        return num_same(left, right)


def num_same(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Return how many leading tokens of both are the same."""
    length = min(len(left), len(right))
    start, block = 0, _FIRST_BLOCK
    while start < length:
        stop = min(start + block, length)
        same = left[start:stop] == right[start:stop]
        first = int(same.argmin())
        if not same[first]:
            return start + first
        start, block = stop, block * 8
    return length


def require_int32(token_ids: NDArray[np.int32], *, field: str) -> None:
    """Refuse ids of another type, because their bytes are compared."""
    if token_ids.dtype != _INT32:
        raise InvalidTurnError(field, f"are {token_ids.dtype}, not int32")


def _bytes_of(token_ids: NDArray[np.int32]) -> memoryview:
    """Return the bytes of the ids, without a copy of a contiguous array."""
    return np.ascontiguousarray(token_ids).data.cast("B") if len(token_ids) else _NO_BYTES
