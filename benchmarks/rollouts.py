"""Input of the batching benchmark: seeded rows, sequences and trajectories.

Each comes as flat read-only buffers, as it arrives in Arrow, and as the lists that a trainer holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import loops
import numpy as np
from numpy.typing import NDArray

from turnstream.types import Ragged, Rows, Turn


@dataclass(frozen=True, slots=True)
class Lists:
    """The rows as lists of lists."""

    prompts: loops.Lists
    responses: loops.Lists
    rewards: loops.Lists
    masks: loops.Lists
    logprobs: loops.Lists


def lengths_of(workload: str, num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Prompt and response lengths of 1,024 rows, as in the figures of the reference."""
    rng = np.random.default_rng(1)
    if workload == "short":
        return rng.integers(50, 201, num_rows), rng.integers(50, 501, num_rows)
    if workload == "2.8 M tokens":
        return rng.integers(128, 1025, num_rows), rng.integers(128, 4097, num_rows)
    prompts = np.linspace(500, 15000, num_rows).astype(np.int64)
    return prompts, np.linspace(15000, 256, num_rows).astype(np.int64)


def make_rows(prompts: NDArray[np.int64], responses: NDArray[np.int64]) -> Rows:
    """Rows over flat read-only buffers, as they arrive in Arrow."""
    rng = np.random.default_rng(2)
    num_rows, num_tokens = len(prompts), int(responses.sum())
    offsets = _offsets(responses)
    rewards = np.zeros(num_tokens, np.float32)
    rewards[offsets[1:] - 1] = 1.0
    zeros: NDArray[np.int32] = np.zeros(num_rows, np.int32)
    empty: NDArray[np.int32] = np.zeros(num_rows + 1, np.int32)
    ids = rng.integers(0, 150_000, int((prompts + responses).sum()), dtype=np.int32)
    return Rows(
        **{name: [""] * num_rows for name in ("trajectory_id", "group_id", "prompt_uid", "status")},
        **dict.fromkeys(("sample", "attempt", "sequence_index"), zeros),
        **dict.fromkeys(("trajectory_num_tokens", "group_num_tokens"), responses),
        **dict.fromkeys(("weight", "reward"), np.ones(num_rows, np.float32)),
        row_id=np.arange(num_rows, dtype=np.int64),
        is_last=np.ones(num_rows, np.bool_),
        is_padding=np.zeros(num_rows, np.bool_),
        advantage=rng.standard_normal(num_rows).astype(np.float32),
        prompt_length=prompts.astype(np.int32),
        input_ids=_column(ids, _offsets(prompts + responses)),
        loss_mask=_column((rng.random(num_tokens) >= 0.2).astype(np.uint8), offsets),
        logprobs=_column(-rng.random(num_tokens, dtype=np.float32), offsets),
        rewards=_column(rewards, offsets),
        run_versions=Ragged(np.empty(0, np.int64), empty),
        run_counts=Ragged(np.empty(0, np.int32), empty),
    )


def _column(values: NDArray[Any], offsets: NDArray[np.int32]) -> Ragged[Any]:
    values.flags.writeable = False
    return Ragged(values, offsets)


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def as_lists(rows: Rows) -> Lists:
    """The same rows as a trainer holds them."""
    assert rows.logprobs is not None
    ids = [row.tolist() for row in rows.input_ids]
    cuts = rows.prompt_length.tolist()
    return Lists(
        prompts=[row[:cut] for row, cut in zip(ids, cuts, strict=True)],
        responses=[row[cut:] for row, cut in zip(ids, cuts, strict=True)],
        rewards=[row.tolist() for row in rows.rewards],
        masks=[row.tolist() for row in rows.loss_mask],
        logprobs=[row.tolist() for row in rows.logprobs],
    )


def rows_from_lists(rows: Rows, lists: Lists) -> Rows:
    """The token columns from lists, the others as they are."""
    both = zip(lists.prompts, lists.responses, strict=True)
    return replace(
        rows,
        input_ids=Ragged.from_rows([p + r for p, r in both], np.int32),
        loss_mask=Ragged.from_rows(lists.masks, np.uint8),
        logprobs=Ragged.from_rows(lists.logprobs, np.float32),
        rewards=Ragged.from_rows(lists.rewards, np.float32),
    )


def make_sequences(low: int, high: int, num_rows: int) -> tuple[Ragged[Any], Ragged[Any]]:
    """Supervised sequences of these lengths, and a weight for every token."""
    rng = np.random.default_rng(3)
    offsets = _offsets(rng.integers(low, high + 1, num_rows))
    ids = _column(rng.integers(0, 150_000, offsets[-1], dtype=np.int32), offsets)
    return ids, _column((rng.random(offsets[-1]) < 0.6).astype(np.float32), offsets)


def make_trajectories(
    size: str, *, breaks: str, num_trajectories: int, num_turns: int = 8
) -> list[list[Turn]]:
    """Trajectories of several turns, each with its whole prompt.

    Args:
        size: "short" or "long".
        breaks: "none"; or when the context is edited, "turn 4" or "every turn", and where: its
            first token, or ", late" the last of the response before, or ", inside" one in its
            middle. An edit stays.
        num_trajectories: how many.
        num_turns: of each.
    """
    when, _, where = breaks.partition(", ")
    rng = np.random.default_rng(4)
    first, (low, high), observed = (
        (512, (128, 256), (64, 256)) if size == "short" else (2048, (512, 1024), (512, 2048))
    )

    def tokens(count: int) -> NDArray[np.int32]:
        return rng.integers(0, 150_000, count, dtype=np.int32)

    made: list[list[Turn]] = []
    for _ in range(num_trajectories):
        prompt, turns, place = tokens(first), list[Turn](), 0
        for index in range(num_turns):
            if index and (when == "every turn" or (when == "turn 4" and index == 4)):
                prompt = prompt.copy()
                prompt[place] += 1
            count = int(rng.integers(low, high + 1))
            turns.append(_turn(prompt, tokens(count), rng))
            seen = tokens(int(rng.integers(observed[0], observed[1] + 1)))
            place = {"": 0, "late": len(prompt) + count - 1, "inside": len(prompt) + count // 2}[
                where
            ]
            prompt = np.concatenate([prompt, turns[-1].response_ids, seen])
        made.append(turns)
    return made


def _turn(prompt: NDArray[np.int32], response: NDArray[np.int32], rng: np.random.Generator) -> Turn:
    rewards = np.zeros(len(response), np.float32)
    rewards[-1] = 1.0
    return Turn(
        prompt_ids=prompt,
        response_ids=response,
        logprobs=-rng.random(len(response), dtype=np.float32),
        loss_mask=np.ones(len(response), np.uint8),
        rewards=rewards,
    )


def turns_as_lists(trajectories: list[list[Turn]]) -> list[list[loops.ListTurn]]:
    """The same turns as lists."""
    return [
        [
            loops.ListTurn(
                *[
                    values.tolist()
                    for values in (t.prompt_ids, t.response_ids, t.loss_mask, t.logprobs, t.rewards)
                    if values is not None
                ]
            )
            for t in turns
        ]
        for turns in trajectories
    ]
