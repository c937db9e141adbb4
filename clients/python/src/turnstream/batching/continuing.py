"""Which earlier turn's row a turn goes on in, for the turns of many trajectories at once.

Nearly every prompt goes on behind the turn before it, or begins with a token that no earlier turn
of its trajectory begins with. Both are seen by comparing it with the turn before; a PrefixIndex is
asked about the others alone.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.prefix import PrefixIndex, require_int32
from turnstream.types import NO_PARENT

_INT32 = np.dtype(np.int32)
_FEW = 4
"""Ends of rows that a prompt is compared with one by one, rather than by an index of all turns."""


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

    That is the turn that a PrefixIndex names, if the prompt holds all of it and no turn before went
    on in its row. With one letter per token::

        place             0      1        2      3         4
        prompt|response   ab|c   abcd|e   xy|z   abcde|f   abc|g
        goes on in        -      0        -      1         -         turn 1 has gone on behind abc
    """
    firsts = _first_tokens(turns)
    found = [NO_PARENT] * len(firsts)
    for place in _followers(turns, firsts):
        found[place] = place - 1
    taken = set(found)
    for place, parent in _whole_parents(turns, _unclear(turns, firsts, found), taken):
        if parent not in taken:
            found[place] = parent
            taken.add(parent)
    return found


def _first_tokens(turns: TurnIds) -> list[int | None]:
    """Of every turn the first token, be it of the prompt or of the response; None if it has none.

    Within a trajectory, turns that begin with different tokens share nothing.
    """
    return [
        prompt.item(0) if len(prompt) else response.item(0) if len(response) else None
        for prompt, response in zip(turns.prompts, turns.responses, strict=True)
    ]


def _followers(turns: TurnIds, firsts: Sequence[int | None]) -> list[int]:
    """Places of turns whose prompt goes on behind the turn before, if that is the longest so far.

    A prompt that holds all of the longest turn shares as much with no other.

    What a prompt holds is compared as bytes, and from the last turn to the first: the bytes of the
    last prompt of a row hold all prompts of that row, and are read out once.
    """
    found: list[int] = []
    held, row = NO_PARENT, b""  # the prompt of turn `held` is a beginning of `row`
    for place in reversed(_candidates(turns)):
        before = place - 1
        if firsts[place] != firsts[before]:
            continue
        prompt = turns.prompts[before]
        if held != place:
            row = turns.prompts[place].tobytes()
        held = place
        if row.startswith(prompt.data) and row.startswith(
            turns.responses[before].data, prompt.nbytes
        ):
            found.append(place)
            held = before
    return found


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


def _unclear(turns: TurnIds, firsts: Sequence[int | None], found: Sequence[int]) -> list[int]:
    """Places of turns that do not follow, but begin as an earlier turn of their trajectory does.

    A follower begins with the token that its predecessor begins with, which is remembered already.
    """
    num_prompt, trajectory = turns.num_prompt_N.tolist(), turns.trajectory_N.tolist()
    unclear: list[int] = []
    seen: set[tuple[int, int | None]] = set()
    for place, parent in enumerate(found):
        if parent == NO_PARENT:
            beginning = trajectory[place], firsts[place]
            if num_prompt[place] and beginning in seen:
                unclear.append(place)
            seen.add(beginning)
    return unclear


def _whole_parents(
    turns: TurnIds, places: Iterable[int], taken: Container[int]
) -> Iterator[tuple[int, int]]:
    """Those of the turns whose prompt holds all of their parent, with the place of the parent.

    Args:
        turns: of all trajectories.
        places: of the turns in question, in order.
        taken: places of turns in whose row another goes on: nobody else can.
    """
    trajectory: list[int] = turns.trajectory_N.tolist()
    for number, asking in itertools.groupby(places, trajectory.__getitem__):
        index = PrefixIndex()
        first = seen = known = bisect.bisect_left(trajectory, number)
        ends: list[int] = []
        for place in asking:
            ends += [before for before in range(seen, place) if before not in taken]
            seen = place
            if len(ends) <= _FEW and not _holds_any(turns, place, ends):
                continue
            for before in range(known, place):
                index.link_and_add(turns.prompts[before], turns.responses[before])
            known = place
            parent, shared = index.link(turns.prompts[place])
            if parent != NO_PARENT and shared == turns.num_tokens_N[first + parent]:
                yield place, first + parent


def _holds_any(turns: TurnIds, place: int, others: Iterable[int]) -> bool:
    """Whether the prompt of a turn holds all of one of the others."""
    prompt = turns.prompts[place].tobytes()
    return any(
        prompt.startswith(turns.prompts[other].data)
        and prompt.startswith(turns.responses[other].data, turns.prompts[other].nbytes)
        for other in others
    )
