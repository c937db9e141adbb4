"""The content of generated trajectories, in which every token is a function of its name.

No two names share a token. So a row proves which turns of which writer it contains.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_TURNS = 3


class EpisodeTurn(NamedTuple):
    """One model call of an episode."""

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]

    @property
    def context(self) -> NDArray[np.int32]:
        """Return the tokens that the next call continues."""
        return np.concatenate([self.prompt_ids, self.response_ids])


class RowColumns(NamedTuple):
    """The expected tokens of a row, and the mask and the start of its response."""

    input_ids: list[int]
    loss_mask: list[int]
    prompt_length: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """One trajectory, and its expected rows.

    Attributes:
        turns: one to three turns; some prompts do not continue the turn before.
        rows: names of the rows; see `row_name`.
        num_trained: trained tokens of every row.
    """

    turns: tuple[EpisodeTurn, ...]
    reward: float
    columns: tuple[RowColumns, ...]
    rows: tuple[str, ...]
    num_trained: tuple[int, ...]


def episode(
    trajectory: str, *, writer: str, before: Sequence[EpisodeTurn] = (), num_more: int = 0
) -> Episode:
    """Return the episode of this writer and name; the same every time.

    It continues the turns of an earlier writer, and samples `num_more` more tokens in every turn.
    """
    seed = f"{writer}|{trajectory}"
    num_turns = max(1 + _number(seed, "turns") % MAX_TURNS, len(before) + 1)
    turns = list(before)
    for index in range(len(before), num_turns):
        observed = _tokens(f"{seed}|{index}|o", 2 + _number(seed, f"o{index}") % 3)
        response = sampled(trajectory, writer=writer, index=index, num_more=num_more)
        forgets = not turns or _number(seed, f"edit{index}") % 5 == 0
        prompt = observed if forgets else np.concatenate([turns[-1].context, observed])
        turns.append(EpisodeTurn(prompt, response))
    spans = _spans(turns)
    columns = tuple(_row(parts) for parts in spans)
    return Episode(
        turns=tuple(turns),
        reward=_number(seed, "reward") % 5 / 4,
        columns=columns,
        rows=tuple(row_name(ids, mask, prompt_length=cut) for ids, mask, cut in columns),
        num_trained=tuple(sum(len(ids) for ids, trained in p if trained) for p in spans),
    )


def sampled(trajectory: str, *, writer: str, index: int, num_more: int = 0) -> NDArray[np.int32]:
    seed = f"{writer}|{trajectory}"
    return _tokens(f"{seed}|{index}|s", 1 + _number(seed, f"s{index}") % 5 + num_more)


def _spans(turns: Sequence[EpisodeTurn]) -> list[list[tuple[NDArray[np.int32], int]]]:
    """Per row its parts, each with 1 where it is trained; a prompt that forgets begins a row."""
    spans: list[list[tuple[NDArray[np.int32], int]]] = []
    context = np.empty(0, np.int32)
    for turn in turns:
        if not spans or not np.array_equal(turn.prompt_ids[: len(context)], context):
            context = np.empty(0, np.int32)
            spans.append([])
        spans[-1] += [(turn.prompt_ids[len(context) :], 0), (turn.response_ids, 1)]
        context = turn.context
    return spans


def row_name(input_ids: Sequence[int], loss_mask: Sequence[int], *, prompt_length: int) -> str:
    """A short name of a row's tokens, masks and cut."""
    text = f"{prompt_length}|{list(map(int, input_ids))}|{list(map(int, loss_mask))}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _row(parts: Sequence[tuple[NDArray[np.int32], int]]) -> RowColumns:
    prompt_length = len(parts[0][0])
    ids = np.concatenate([tokens for tokens, _ in parts]).tolist()
    mask = [trained for tokens, trained in parts for _ in tokens][prompt_length:]
    return RowColumns(ids, mask, prompt_length)


def _tokens(name: str, count: int) -> NDArray[np.int32]:
    digest = hashlib.shake_256(name.encode()).digest(4 * count)
    return (np.frombuffer(digest, np.uint32) & 0x7FFF_FFFF).astype(np.int32)


def _number(seed: str, what: str) -> int:
    return zlib.crc32(f"{seed}|{what}".encode())


def is_never_adopted(group: str, *, one_in: int) -> bool:
    """Return whether no generator adopts this group: one in so many, 0 for none."""
    return bool(one_in) and _number(group, "never adopted") % one_in == 0
