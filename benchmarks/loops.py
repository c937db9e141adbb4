"""The same jobs as loops over Python lists: the baseline of the functions of turnstream.batching.

Written from the definitions, one row at a time and one token at a time, as trainers have it. They
get everything as lists and give numpy arrays, in the types that trainers use: int64 ids and masks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Lists = list[list[Any]]


def left_padded(
    prompts: Lists, responses: Lists, rewards: Lists, masks: Lists, logprobs: Lists | None
) -> list[np.ndarray]:
    """Rows that end in the last column, and their response columns, row by row."""
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    response_width = max(len(r) for r in responses)
    sequences, attention, response_mask = [], [], []
    placed: list[Lists] = [[] for _ in range(3)]
    columns = [rewards, masks, logprobs]
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        padding = width - len(prompt) - len(response)
        sequences.append([0] * padding + prompt + response)
        attention.append([0] * padding + [1] * (len(prompt) + len(response)))
        padding = response_width - len(response)
        response_mask.append([0] * padding + [1] * len(response))
        for into, column in zip(placed, columns, strict=True):
            if column is not None:
                into.append([0.0] * padding + column[i])
    whole = [np.array(lists, np.int64) for lists in (sequences, attention, response_mask)]
    return whole + [np.array(lists, np.float32) for lists in placed if lists]


def packed_supervised(
    sequences: Lists, weights: Lists, *, capacity: int, dp_world_size: int
) -> list[np.ndarray]:
    """First-fit-decreasing bins in shard-major order, laid out token by token."""
    bins = _spread(_first_fit_decreasing(sequences, capacity), dp_world_size)
    bins = [bins[k] for rank in range(dp_world_size) for k in range(rank, len(bins), dp_world_size)]
    width = max(sum(len(sequences[i]) for i in rows) for rows in bins)
    total = max(1.0, sum(w for row in weights for w in row[1:]))
    ids, attention, positions, scores = [], [], [], []
    for rows in bins:
        line: Lists = [[0] * width, [0] * width, [0] * width, [0.0] * width]
        slot = 0
        for i in rows:
            length = len(sequences[i])
            for j in range(length):
                line[0][slot + j] = sequences[i][j]
                line[1][slot + j] = 1
                line[2][slot + j] = j
                if j + 1 < length:
                    line[3][slot + j] = weights[i][j + 1] / total
            slot += length
        for into, values in zip((ids, attention, positions, scores), line, strict=True):
            into.append(values)
    whole = [np.array(lists, np.int64) for lists in (ids, attention, positions)]
    return [*whole, np.array(scores, np.float32)]


def _first_fit_decreasing(sequences: Lists, capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
        length = len(sequences[i])
        for k in range(len(bins)):
            if room[k] >= length:
                bins[k].append(i)
                room[k] -= length
                break
        else:
            bins.append([i])
            room.append(capacity - length)
    return bins


def _spread(bins: list[list[int]], multiple: int) -> list[list[int]]:
    while len(bins) % multiple:
        bins.append([max(bins, key=len).pop()])
    return bins


@dataclass
class ListTurn:
    """A turn as lists."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]
    rewards: list[float]


@dataclass
class ListRow:
    """A merged row as lists."""

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def add(self, observed: list[int], turn: ListTurn) -> None:
        """Extend the row by observed tokens and a response."""
        gap = len(observed)
        self.response += observed + turn.response
        self.mask += [0] * gap + turn.mask
        self.logprobs += [0.0] * gap + turn.logprobs
        self.rewards += [0.0] * gap + turn.rewards


def merge_lists(trajectories: list[list[ListTurn]]) -> list[ListRow]:
    """Rows of all trajectories; a prompt that begins with everything so far continues its row."""
    rows: list[ListRow] = []
    for turns in trajectories:
        row: ListRow | None = None
        for turn in turns:
            full = [] if row is None else row.prompt + row.response
            if row is None or turn.prompt[: len(full)] != full:
                row = ListRow(turn.prompt)
                rows.append(row)
                row.add([], turn)
            else:
                row.add(turn.prompt[len(full) :], turn)
    return rows


def merge(trajectories: list[list[ListTurn]]) -> list[list[np.ndarray]]:
    """`merge_lists`, and an array of every list."""
    return [
        [
            np.array(row.prompt + row.response, np.int64),
            np.array(row.mask, np.int64),
            np.array(row.logprobs, np.float32),
            np.array(row.rewards, np.float32),
        ]
        for row in merge_lists(trajectories)
    ]
