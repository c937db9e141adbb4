"""Which earlier turn's row a turn goes on in, for the turns of many trajectories at once.

Nearly every prompt goes on behind the turn before it, or begins with a token that no earlier turn
of its trajectory begins with. Both are seen by comparing it with the turn before. The others are
compared with the rows that nobody went on in yet, each at one token at first: an agent that edits
its context keeps the edit, so that the place where one prompt leaves a row is where the next does.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.prefix import num_same, require_int32
from turnstream.types import NO_PARENT

_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnIds:
    """Token ids of the N turns of many trajectories, those of a trajectory in order.

    Attributes:
        prompts: N whole prompts, each in one piece of memory.
        responses: N, likewise.
        num_prompt_N: int64 (N,), their lengths.
        num_tokens_N: int64 (N,), of prompt + response.
        trajectory_N: int64 (N,), counted up from 0.
    """

    prompts: Sequence[NDArray[np.int32]]
    responses: Sequence[NDArray[np.int32]]
    num_prompt_N: NDArray[np.int64]
    num_tokens_N: NDArray[np.int64]
    trajectory_N: NDArray[np.int64]


def turn_ids(
    prompts: Sequence[NDArray[np.int32]],
    responses: Sequence[NDArray[np.int32]],
    *,
    num_turns: Sequence[int],
) -> TurnIds:
    """The ids of these turns, ready to be compared.

    Args:
        prompts: N of them.
        responses: N.
        num_turns: of every trajectory, N together.

    Raises:
        InvalidTurnError: ids are not int32: their bytes are compared.
    """
    _require_int32(prompts, field="prompt_ids")
    _require_int32(responses, field="response_ids")
    num_prompt_N = np.fromiter(map(len, prompts), np.int64, len(prompts))
    num_response_N = np.fromiter(map(len, responses), np.int64, len(responses))
    return TurnIds(
        prompts=[*map(np.ascontiguousarray, prompts)],
        responses=[*map(np.ascontiguousarray, responses)],
        num_prompt_N=num_prompt_N,
        num_tokens_N=num_prompt_N + num_response_N,
        trajectory_N=np.repeat(np.arange(len(num_turns)), num_turns),
    )


def _require_int32(arrays: Sequence[NDArray[np.int32]], *, field: str) -> None:
    if {array.dtype for array in arrays} - {_INT32}:
        for array in arrays:
            require_int32(array, field=field)


def continued_turns(turns: TurnIds) -> list[int]:
    """N places: of the turn whose row each turn goes on in; NO_PARENT where it begins a row.

    That is the row which a PrefixIndex names: the longest that the prompt holds whole and that no
    turn before went on in, of equal ones the newest. With one letter per token::

        place             0      1        2      3         4
        prompt|response   ab|c   abcd|e   xy|z   abcde|f   abc|g
        goes on in        -      0        -      1         -         turn 1 has gone on behind abc
    """
    firsts: list[int | None] = []
    found = [NO_PARENT] * len(turns.prompts)
    for places, candidates in _by_trajectory(turns):
        firsts += _first_tokens(turns, places)
        followers, differing = _followers(turns, firsts, candidates)
        for place in followers:
            found[place] = place - 1
        if len(followers) < len(places) - 1:
            unclear = _unclear(firsts, places, found)
            for place, parent in _found_slowly(turns, places, unclear, found, differing):
                found[place] = parent
    return found


def _by_trajectory(turns: TurnIds) -> Iterator[tuple[range, list[int]]]:
    """The places of every trajectory that has any, and those of its candidates.

    One after the other in all that is asked of them: tokens are read while they are near.
    """
    starts = np.flatnonzero(np.diff(turns.trajectory_N, prepend=-1))
    ends = [*starts.tolist(), len(turns.prompts)]
    candidates = _candidates(turns)
    bounds = [*np.searchsorted(candidates, starts).tolist(), len(candidates)]
    for number in range(len(starts)):
        yield (
            range(ends[number], ends[number + 1]),
            candidates[bounds[number] : bounds[number + 1]],
        )


def _first_tokens(turns: TurnIds, places: range) -> list[int | None]:
    """Of every turn the first token, be it of the prompt or of the response; None if it has none.

    Within a trajectory, turns that begin with different tokens share nothing.
    """
    return [
        prompt.item(0) if len(prompt) else response.item(0) if len(response) else None
        for prompt, response in zip(
            turns.prompts[places.start : places.stop],
            turns.responses[places.start : places.stop],
            strict=True,
        )
    ]


def _followers(
    turns: TurnIds, firsts: Sequence[int | None], candidates: Sequence[int]
) -> tuple[list[int], dict[int, int]]:
    """Places of turns whose prompt goes on behind the turn before, if that is the longest so far.

    A prompt that holds all of the longest turn holds no longer row, and nobody went on in that of
    the turn before.

    What a prompt holds is compared as bytes, and from the last turn to the first: the bytes of the
    last prompt of a row hold all prompts of that row, and are read out once.

    Returns:
        The places, and of turns that were compared with the prompt behind them in vain, the
        position of a difference.
    """
    found: list[int] = []
    differing: dict[int, int] = {}
    held, row = NO_PARENT, b""  # the prompt of turn `held` is a beginning of `row`
    for place in reversed(candidates):
        before = place - 1
        if firsts[place] != firsts[before]:
            continue
        prompt, response = turns.prompts[before], turns.responses[before]
        if held != place:
            num_held = _num_held_behind(len(prompt), response, turns.prompts[place])
            if num_held < len(response):
                differing[before] = len(prompt) + num_held
                continue
            row = turns.prompts[place].tobytes()
        held = place
        if not row.startswith(prompt.data):
            differing[before] = num_same(turns.prompts[place], prompt)
        elif not row.startswith(response.data, prompt.nbytes):
            differing[before] = len(prompt) + num_same(
                turns.prompts[place][len(prompt) :], response
            )
        else:
            found.append(place)
            held = before
    return found, differing


def _num_held_behind(start: int, response: NDArray[np.int32], prompt: NDArray[np.int32]) -> int:
    """Tokens of a response that a prompt has from there on; all but one if the last differs.

    A context is edited near its end, mostly: what is seen here need not be compared from the start.
    One comparison says whether they differ and where; responses are short, beside prompts.
    """
    last = len(response) - 1
    if last < 0:
        return 0
    if prompt.item(start + last) != response.item(last):
        return last
    is_same = prompt[start : start + last + 1] == response
    held = int(is_same.argmin())
    return last + 1 if is_same.item(held) else held


def _token(turns: TurnIds, row: int, position: int) -> int:
    """The token at this place of a turn's prompt + response."""
    prompt = turns.prompts[row]
    if position < len(prompt):
        return prompt.item(position)
    return turns.responses[row].item(position - len(prompt))


def _candidates(turns: TurnIds) -> list[int]:
    """Places of turns that are long enough to follow the turn before, which is the longest."""
    before, after = slice(None, -1), slice(1, None)
    may_follow = (
        _is_longest(turns)[before]
        & (turns.num_tokens_N[before] <= turns.num_prompt_N[after])
        & (turns.trajectory_N[before] == turns.trajectory_N[after])
    )
    return (np.flatnonzero(may_follow) + 1).tolist()


def _is_longest(turns: TurnIds) -> NDArray[np.bool_]:
    """(N,), whether a turn has any token, and more than each before it in its trajectory."""
    # Lifted so far that no turn reaches those of the next trajectory.
    lift = int(turns.num_tokens_N.max(initial=0)) + 1
    lifted_N = turns.num_tokens_N + turns.trajectory_N * lift
    is_longest_N = turns.num_tokens_N > 0
    is_longest_N[1:] &= lifted_N[1:] > np.maximum.accumulate(lifted_N)[:-1]
    return is_longest_N


def _unclear(firsts: Sequence[int | None], places: range, found: Sequence[int]) -> list[int]:
    """Places of turns that do not follow, but begin as an earlier turn of their trajectory does.

    A follower begins with the token that its predecessor begins with, which is remembered already.
    A turn without a token is a beginning of all.
    """
    unclear: list[int] = []
    seen: set[int | None] = set()
    for place in places:
        if found[place] == NO_PARENT:
            if firsts[place] in seen or None in seen:
                unclear.append(place)
            seen.add(firsts[place])
    return unclear


def _found_slowly(
    turns: TurnIds,
    places: range,
    asking: Sequence[int],
    found: Sequence[int],
    differing: Mapping[int, int],
) -> Iterator[tuple[int, int]]:
    """Those of the turns that go on in a row, with the place of the turn that the row ended with.

    Args:
        turns: of all trajectories.
        places: of the turns of one.
        asking: of those in question, in order.
        found: of every turn that it follows, with the turn before.
        differing: of some turns, where the prompt behind them differs.
    """
    if not asking:
        return
    rows = _OpenRows(turns)
    seen = places.start
    for place in asking:
        for before in range(seen, place):
            if found[before + 1] != before:
                rows.open(before, differing.get(before))
        seen = place
        parent = rows.go_on(place)
        if parent != NO_PARENT:
            yield place, parent


_OpenRow = tuple[int, int, int, int]
"""A row that no turn went on in yet: its tokens; its last turn; where it is asked at first whether
a prompt holds the row; and its token there. A plain tuple, of which thousands are made."""


class _OpenRows:
    """The open rows of a trajectory, ordered by their lengths, then by their last turns."""

    def __init__(self, turns: TurnIds) -> None:
        self._turns = turns
        self._rows: list[_OpenRow] = []

    def open(self, turn: int, position: int | None) -> None:
        """A row ends with this turn; `position` is where a prompt differed from it, if any did."""
        num_tokens = len(self._turns.prompts[turn]) + len(self._turns.responses[turn])
        position = num_tokens - 1 if position is None else position
        token = _token(self._turns, turn, position) if num_tokens else NO_PARENT
        bisect.insort(self._rows, (num_tokens, turn, position, token))

    def go_on(self, place: int) -> int:
        """The last turn of the row that a turn goes on in, which is open no more, or NO_PARENT."""
        prompt, rows = self._turns.prompts[place].data, self._rows
        for number in range(bisect.bisect_left(rows, (len(prompt) + 1,)) - 1, -1, -1):
            num_tokens, turn, position, token = rows[number]
            if num_tokens and prompt[position] != token:
                continue
            position = self._num_held(place, turn)
            if position == num_tokens:
                del rows[number]
                return turn
            rows[number] = num_tokens, turn, position, _token(self._turns, turn, position)
        return NO_PARENT

    def _num_held(self, place: int, turn: int) -> int:
        """How many tokens of an earlier turn a prompt begins with."""
        prompt, begin = self._turns.prompts[place], self._turns.prompts[turn]
        num_tokens = num_same(prompt, begin)
        if num_tokens < len(begin):
            return num_tokens
        return num_tokens + num_same(prompt[num_tokens:], self._turns.responses[turn])
