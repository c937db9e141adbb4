"""The seeded workloads of the whole-path benchmark, and the checksum both of its ends agree on.

`make_groups`: 1,024 trajectories = 128 groups x 8, one turn each: prompt 256-768, response
1,024-3,072 tokens, float32 log-probabilities, a 0/1 mask with a fifth of zeros, one reward: 31 MB
with int64 ids.

`make_agentic_groups`: 512 trajectories = 64 groups x 8 of 16 turns. A turn has the prompt and the
response of the turn before, 32-96 new prompt tokens, and a response of 96-160 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from turnstream.types import Group, Trajectory, Turn

GROUP_SIZE = 8
AGENTIC_TURNS = 16


@dataclass(frozen=True, slots=True)
class Checksum:
    """Sums that do not depend on the order of rows, nor on padding."""

    num_rows: int
    ids: int
    mask: int
    logprob_bits: int
    rewards: float

    def __add__(self, other: Checksum) -> Checksum:
        return Checksum(
            self.num_rows + other.num_rows,
            (self.ids + other.ids) % 2**64,
            self.mask + other.mask,
            (self.logprob_bits + other.logprob_bits) % 2**64,
            self.rewards + other.rewards,
        )


def make_groups(num_groups: int, *, seed: int = 0) -> list[Group]:
    """The groups of the workload, in the order in which they finish."""
    rng = np.random.default_rng(seed)
    return [
        Group(
            group_id=f"g{index:05d}",
            prompt_uid=f"task-{index}",
            trajectories=[_trajectory(rng, sample=sample) for sample in range(GROUP_SIZE)],
        )
        for index in range(num_groups)
    ]


def _trajectory(rng: np.random.Generator, *, sample: int) -> Trajectory:
    num_prompt, num_response = int(rng.integers(256, 769)), int(rng.integers(1024, 3073))
    mask = (rng.random(num_response) >= 0.2).astype(np.uint8)
    logprobs = -rng.exponential(1.0, num_response).astype(np.float32)
    logprobs[mask == 0] = 0.0
    turn = Turn(
        prompt_ids=rng.integers(0, 150_000, num_prompt, dtype=np.int32),
        response_ids=rng.integers(0, 150_000, num_response, dtype=np.int32),
        logprobs=logprobs,
        loss_mask=mask,
    )
    return Trajectory(turns=[turn], sample=sample, reward=float(rng.integers(0, 2)))


def make_agentic_groups(num_groups: int, *, first: int = 0) -> list[Group]:
    """Return the groups `first` to `first + num_groups` of the workload with many turns."""
    return [
        Group(
            group_id=f"g{index:05d}",
            prompt_uid=f"task-{index}",
            trajectories=[
                _conversation(np.random.default_rng([index, sample]), sample=sample)
                for sample in range(GROUP_SIZE)
            ],
        )
        for index in range(first, first + num_groups)
    ]


def _conversation(rng: np.random.Generator, *, sample: int) -> Trajectory:
    prompts = rng.integers(32, 97, AGENTIC_TURNS)
    responses = rng.integers(96, 161, AGENTIC_TURNS)
    ends = np.cumsum(prompts + responses).tolist()
    ids = rng.integers(0, 150_000, ends[-1], dtype=np.int32)
    turns = [
        Turn(
            prompt_ids=ids[: end - num],
            response_ids=ids[end - num : end],
            logprobs=-rng.exponential(1.0, num).astype(np.float32),
            loss_mask=np.ones(num, np.uint8),
        )
        for end, num in zip(ends, responses.tolist(), strict=True)
    ]
    return Trajectory(turns=turns, sample=sample, reward=float(rng.integers(0, 2)))


def checksum_row(
    ids_T: np.ndarray, mask_R: np.ndarray, logprobs_R: np.ndarray, reward: float
) -> Checksum:
    """Checksum of one row without its padding; ids are weighted by their position."""
    positions_T = np.arange(1, len(ids_T) + 1, dtype=np.uint64)
    return Checksum(
        num_rows=1,
        ids=int((ids_T.astype(np.uint64) * positions_T).sum()) % 2**64,
        mask=int(mask_R.sum()),
        logprob_bits=int(logprobs_R.astype(np.float32).view(np.uint32).astype(np.uint64).sum()),
        rewards=float(reward),
    )


def checksum_groups(groups: list[Group]) -> Checksum:
    """Return the checksum of the producer's groups; each trajectory is one row."""
    total = Checksum(0, 0, 0, 0, 0.0)
    for group in groups:
        for trajectory in group.trajectories:
            last = trajectory.turns[-1]
            masks = [turn.loss_mask for turn in trajectory.turns if turn.loss_mask is not None]
            logprobs = [turn.logprobs for turn in trajectory.turns if turn.logprobs is not None]
            total += checksum_row(
                np.concatenate([last.prompt_ids, last.response_ids]),
                np.concatenate(masks),
                np.concatenate(logprobs),
                trajectory.reward or 0.0,
            )
    return total


def int64_bytes(groups: list[Group]) -> int:
    """Logical payload of the rows: int64 ids, float32 log-probabilities and byte masks."""
    return sum(
        8 * (len(trajectory.turns[-1].prompt_ids) + len(trajectory.turns[-1].response_ids))
        + 5 * sum(len(turn.response_ids) for turn in trajectory.turns)
        for group in groups
        for trajectory in group.trajectories
    )
