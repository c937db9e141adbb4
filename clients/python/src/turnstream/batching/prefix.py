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
_INT32 = np.dtype(np.int32)
_NO_BYTES = memoryview(b"")

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
        self._root = _Line(None, 0)
        self._ends: list[tuple[_Line, int]] = []
        # (line, offset, its first token) -> the line that leaves that one there. Kept here and not
        # in lines, which would refer to each other in circles: memory is then free at once.
        self._branches: dict[tuple[_Line, int, bytes], _Line] = {}

    def link(self, prompt_ids: NDArray[np.int32]) -> PrefixMatch:
        """The longest beginning of this prompt that earlier turns hold, and the turn that does.

        Prompts and responses count alike; a beginning may end inside either. Where several turns
        hold it, the lowest that ends there is named, otherwise the lowest of them.

        Args:
            prompt_ids: int32 (P,); may be empty.

        Raises:
            InvalidTurnError: the ids are not int32: their bytes are compared.
        """
        require_int32(prompt_ids, field="prompt_ids")
        match, _, _ = self._find(_bytes_of(prompt_ids))
        return match

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
        require_int32(response_ids, field="response_ids")
        line, offset = self._locate(match)
        self._remember(line, offset, _bytes_of(prompt_ids[match.shared_tokens :]), response_ids)

    def link_and_add(
        self, prompt_ids: NDArray[np.int32], response_ids: NDArray[np.int32]
    ) -> PrefixMatch:
        """`link`, then `add`, in less time.

        Raises:
            InvalidTurnError: the ids are not int32; nothing is remembered.
        """
        require_int32(prompt_ids, field="prompt_ids")
        require_int32(response_ids, field="response_ids")
        tokens = _bytes_of(prompt_ids)
        match, line, offset = self._find(tokens)
        self._remember(line, offset, tokens[match.shared_tokens * _TOKEN_BYTES :], response_ids)
        return match

    def _find(self, prompt: memoryview) -> tuple[PrefixMatch, _Line, int]:
        """The match of a prompt, and the place where it leaves the tree."""
        line, end = self._ends[-1] if self._root.length else (self._root, 0)
        if 0 < end == line.length and line.depth == 0 and line.begins(prompt):
            # The usual case, one comparison of memory: it goes on behind the last turn.
            return PrefixMatch(line.turn_at(end), end), line, end
        line, offset, shared = self._walk(self._root, 0, prompt)
        if shared == 0:
            return PrefixMatch(NO_PARENT, 0), line, offset
        return PrefixMatch(line.turn_at(offset), shared), line, offset

    def _remember(
        self, line: _Line, offset: int, new_ids: memoryview, response_ids: NDArray[np.int32]
    ) -> None:
        turn = len(self._ends)
        response = memoryview(response_ids.tobytes())
        if not new_ids:
            # The response may repeat what another turn went on with: best-of-n samples often do.
            line, offset, known = self._walk(line, offset, response)
            response = response[known * _TOKEN_BYTES :]
        if first := bytes((new_ids or response)[:_TOKEN_BYTES]):
            if offset < line.length:
                branch = _Line(line, line.depth + offset)
                self._branches[line, offset, first] = branch
                line = branch
            offset = line.write(new_ids, response, turn=turn)
        line.ends.setdefault(offset, turn)
        self._ends.append((line, offset))

    def _locate(self, match: PrefixMatch) -> tuple[_Line, int]:
        if match.shared_tokens == 0:
            return self._root, 0
        line, _ = self._ends[match.parent_turn]
        while line.parent is not None and line.depth >= match.shared_tokens:
            line = line.parent
        return line, match.shared_tokens - line.depth

    def _walk(self, line: _Line, offset: int, tokens: memoryview) -> tuple[_Line, int, int]:
        """Follow tokens from a place in the tree: where they leave it, and how many did not."""
        known = 0
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
        tokens: their bytes, int32 each; as bytes they are compared by one call, without an array.
        writes: (offset, turn): from there on, the tokens were written by that turn.
        ends: offset -> the lowest turn that ends there.
    """

    __slots__ = ("depth", "ends", "length", "parent", "tokens", "writes")

    def __init__(self, parent: _Line | None, depth: int) -> None:
        self.parent = parent
        self.depth = depth
        self.length = 0
        self.tokens = bytearray()
        self.writes: list[tuple[int, int]] = []
        self.ends: dict[int, int] = {}

    def turn_at(self, offset: int) -> int:
        """The lowest turn that ends at this offset > 0, else the one that wrote the token before.

        Any other turn that holds that token came later.
        """
        ending = self.ends.get(offset)
        if ending is not None:
            return ending
        return self.writes[bisect.bisect_left(self.writes, (offset,)) - 1][1]

    def begins(self, prompt: memoryview) -> bool:
        """Whether the prompt begins with all of this line."""
        length = len(self.tokens)
        return length <= len(prompt) and self.tokens.startswith(prompt[:length])

    def write(self, *pieces: memoryview, turn: int) -> int:
        """Go on behind the last token: where the new ones end."""
        self.writes.append((self.length, turn))
        if self.length:
            self.tokens += b"".join(pieces)
        else:
            self.tokens = bytearray().join(pieces)
        self.length = len(self.tokens) // _TOKEN_BYTES
        return self.length

    def num_same(self, offset: int, tokens: memoryview, known: int) -> int:
        """How many tokens agree: the line's from `offset` on, and the given from `known` on."""
        length = min(self.length - offset, len(tokens) // _TOKEN_BYTES - known)
        here, there = offset * _TOKEN_BYTES, known * _TOKEN_BYTES
        if not self.tokens.startswith(tokens[there : there + _TOKEN_BYTES], here):
            return 0
        if self.tokens.startswith(tokens[there : there + length * _TOKEN_BYTES], here):
            return length
        left = np.frombuffer(self.tokens, np.int32, length, here)
        right = np.frombuffer(tokens, np.int32, length, there)
        start, block = 0, _FIRST_BLOCK
        while start < length:
            same = left[start : start + block] == right[start : start + block]
            if not same.all():
                return start + int(same.argmin())
            start, block = start + block, block * 8
        return length


def require_int32(token_ids: NDArray[np.int32], *, field: str) -> None:
    """Refuse ids of another type: it is their bytes that are compared.

    Raises:
        InvalidTurnError: names the field and the type.
    """
    if token_ids.dtype != _INT32:
        raise InvalidTurnError(field, f"are {token_ids.dtype}, not int32")


def _bytes_of(token_ids: NDArray[np.int32]) -> memoryview:
    """Their bytes, without a copy if they lie together."""
    return np.ascontiguousarray(token_ids).data.cast("B") if len(token_ids) else _NO_BYTES
