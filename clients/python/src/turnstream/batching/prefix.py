"""Which earlier turn of a trajectory holds the longest beginning of a prompt.

The tokens of all turns form a tree. It is kept as *lines*: stretches of tokens in one buffer each,
which grow at their end and are never cut. A line begins where its first token differs from the one
that was there before, at an anchor in its parent line. With one letter per token, the prompts and
responses `ab|cd`, `abcde|f`, `abx|y` are two lines::

    a b c d e f        written by turn 0 (abcd) and turn 1 (ef)
        x y            anchored behind "ab", written by turn 2

So an agent that goes on with its own context has all of it in one buffer, and finding the prefix
is one comparison; a sub-agent or an edited context costs one more line.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import InvalidTurnError
from turnstream.types import NO_PARENT

_TOKEN_BYTES = 4

_FIRST_BLOCK = 1024
"""Tokens compared at first; each further block is 8 times longer.

A mismatch is found after at most 8 times the tokens that agree, so linking stays linear in tokens,
and a long match costs few calls.
"""


class PrefixMatch(NamedTuple):
    """The first `shared_tokens` tokens of a prompt are those of `parent_turn`'s prompt + response.

    `parent_turn` is NO_PARENT where nothing is shared.
    """

    parent_turn: int
    shared_tokens: int


class PrefixIndex:
    """The tokens of a trajectory's turns, for finding the longest known beginning of the next.

    Turns are numbered from 0 in the order of `add`. Memory: the tokens that are new in each turn.

    >>> index = PrefixIndex()
    >>> first = np.array([1, 2], np.int32), np.array([3], np.int32)
    >>> index.add(index.link(first[0]), *first)
    >>> index.link(np.array([1, 2, 3, 4], np.int32))
    PrefixMatch(parent_turn=0, shared_tokens=3)
    """

    def __init__(self) -> None:
        self._root = _Line(parent=None, depth=0)
        self._ends: list[tuple[_Line, int]] = []

    def link(self, prompt_ids: NDArray[np.int32]) -> PrefixMatch:
        """The longest beginning of this prompt that earlier turns hold, and the turn that does.

        Prompts and responses count alike; a beginning may end inside either. Where several turns
        hold it, the lowest that ends there is named, otherwise the lowest of them.

        Args:
            prompt_ids: int32 (P,); may be empty.

        Raises:
            InvalidTurnError: the ids are not int32: their bytes are compared.
        """
        _require_int32(prompt_ids, field="prompt_ids")
        if not self._root.length:
            return PrefixMatch(NO_PARENT, 0)
        line, offset, shared = _walk(self._root, 0, prompt_ids.tobytes())
        if shared == 0:
            return PrefixMatch(NO_PARENT, 0)
        return PrefixMatch(line.turn_at(offset), shared)

    def add(
        self,
        match: PrefixMatch,
        prompt_ids: NDArray[np.int32],
        response_ids: NDArray[np.int32],
    ) -> None:
        """Remember the next turn. The arrays are copied where they are new.

        Args:
            match: what `link` gave for `prompt_ids`, with no turn added since.
            prompt_ids: int32 (P,).
            response_ids: int32 (R,).

        Raises:
            InvalidTurnError: the ids are not int32.
        """
        _require_int32(response_ids, field="response_ids")
        turn = len(self._ends)
        line, offset = self._locate(match)
        prompt_ids = prompt_ids[match.shared_tokens :]
        if offset < line.length:
            # The response may repeat what another turn went on with: best-of-n samples often do.
            own = prompt_ids.tobytes() + response_ids.tobytes()
            line, offset, known = _walk(line, offset, own)
            line, offset = line.write(offset, [memoryview(own)[known * _TOKEN_BYTES :]], turn=turn)
        else:
            line, offset = line.write(offset, [_view(prompt_ids), _view(response_ids)], turn=turn)
        line.ends.setdefault(offset, turn)
        self._ends.append((line, offset))

    def _locate(self, match: PrefixMatch) -> tuple[_Line, int]:
        if match.shared_tokens == 0:
            return self._root, 0
        line, _ = self._ends[match.parent_turn]
        while line.parent is not None and line.depth >= match.shared_tokens:
            line = line.parent
        return line, match.shared_tokens - line.depth


class _Line:
    """A stretch of tokens: `depth` tokens come before it on the path from the root.

    Attributes:
        length: in tokens.
        tokens: their bytes, int32 each; as bytes they are compared by one call, without an array.
        starts, writers: from offset `starts[i]` on, the tokens were written by turn `writers[i]`.
        ends: offset -> the lowest turn that ends there.
        branches: (offset, bytes of the first token) -> the line that leaves this one there.
    """

    __slots__ = ("branches", "depth", "ends", "length", "parent", "starts", "tokens", "writers")

    def __init__(self, *, parent: _Line | None, depth: int) -> None:
        self.parent = parent
        self.depth = depth
        self.length = 0
        self.tokens = bytearray()
        self.starts: list[int] = []
        self.writers: list[int] = []
        self.ends: dict[int, int] = {}
        self.branches: dict[tuple[int, bytes], _Line] = {}

    def turn_at(self, offset: int) -> int:
        """The lowest turn that ends at this offset > 0, else the one that wrote the token before.

        Any other turn that holds that token came later.
        """
        ending = self.ends.get(offset)
        if ending is not None:
            return ending
        return self.writers[bisect.bisect_left(self.starts, offset) - 1]

    def write(self, offset: int, tokens: list[memoryview], *, turn: int) -> tuple[_Line, int]:
        """Go on with tokens that nothing at this offset goes on with yet: where they end."""
        num_bytes = sum([piece.nbytes for piece in tokens])
        if num_bytes == 0:
            return self, offset
        line = self
        if offset < self.length:
            line = _Line(parent=self, depth=self.depth + offset)
            self.branches[offset, bytes(tokens[0][:_TOKEN_BYTES])] = line
        line.starts.append(line.length)
        line.writers.append(turn)
        for piece in tokens:
            line.tokens += piece
        line.length += num_bytes // _TOKEN_BYTES
        return line, line.length


def _require_int32(token_ids: NDArray[np.int32], *, field: str) -> None:
    if token_ids.dtype != np.int32:
        raise InvalidTurnError(field, f"are {token_ids.dtype}, not int32")


def _view(token_ids: NDArray[np.int32]) -> memoryview:
    return np.ascontiguousarray(token_ids).data


def _walk(line: _Line, offset: int, tokens: bytes) -> tuple[_Line, int, int]:
    """Follow tokens from a place in the tree: where they leave it, and how many did not."""
    known = 0
    num_tokens = len(tokens) // _TOKEN_BYTES
    while True:
        same = _num_same(line, offset, tokens, known)
        offset += same
        known += same
        if known == num_tokens or offset == line.length:
            return line, offset, known
        first = known * _TOKEN_BYTES
        branch = line.branches.get((offset, tokens[first : first + _TOKEN_BYTES]))
        if branch is None:
            return line, offset, known
        line, offset = branch, 0


def _num_same(line: _Line, offset: int, tokens: bytes, known: int) -> int:
    """How many tokens agree: the line's from `offset` on, and the given from `known` on."""
    rest = line.length - offset
    length = min(rest, len(tokens) // _TOKEN_BYTES - known)
    if length == 0:
        return 0
    if length == rest:
        # The usual case, one comparison of memory: the prompt goes on behind all of the line.
        tail = memoryview(line.tokens)[offset * _TOKEN_BYTES :] if offset else line.tokens
        if tokens.startswith(tail, known * _TOKEN_BYTES):
            return length
    left = np.frombuffer(line.tokens, np.int32, length, offset * _TOKEN_BYTES)
    right = np.frombuffer(tokens, np.int32, length, known * _TOKEN_BYTES)
    start, block = 0, _FIRST_BLOCK
    while start < length:
        same = left[start : start + block] == right[start : start + block]
        if not same.all():
            return start + int(same.argmin())
        start, block = start + block, block * 8
    return length
