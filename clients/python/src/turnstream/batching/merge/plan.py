"""The content of a manifest: the plan of a batch, made without reading a token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from turnstream.types import Denominators, Figures, Status, TrajectoryKey

ASSEMBLY_VERSION = 6
"""Version of the assembly rules; a plan of a newer version gives other rows under older rules.

A replica assembles plans up to this version. Its error for newer ones has both versions. In version
0 all rows of a trajectory weigh alike and none is masked. Before version 2 a plan has no tags and
metrics. Before version 3 all turns of a trajectory have its advantage. Before version 4 a
mini-batch does not name the run's aggregation. A plan has version 6 if it leaves turns out of the
rows, and otherwise version 5."""

PLAIN_ASSEMBLY_VERSION = 5
"""Version of plans whose rows have all turns."""


class SequenceShape(NamedTuple):
    """One planned row: the turns that it merges, and its lengths in tokens.

    Attributes:
        turns: indices of the merged turns, ascending; the prompt is that of the first. A turn in no
            row is left out.
        prompt_length: tokens before the first response.
        num_trained_tokens: response tokens with mask 1 that the plan does not mask.
    """

    turns: tuple[int, ...]
    prompt_length: int
    num_tokens: int
    num_trained_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryPlan:
    """One trajectory of a batch.

    Attributes:
        reward: the one reward of the trajectory, with the penalty of its length. The estimator also
            saw the length reward, which depends on the group.
        advantage: float32 value for every row, applied by the row's own mask; where turns have
            advantages of their own, the advantage of the whole trajectory, which no token has.
        weights: float32 values, one loss weight per sequence.
        num_turn_tokens: tokens of the turns of all rows sent one by one, for the merge ratio.
        is_masked: no token of it is trained, whatever its payload says.
        payload_crcs: CRC-32 of every turn's payload; the assembler refuses any other.
        turn_advantages: float32 values, one per turn, each for the tokens that its turn sampled, in
            the row that trains them; empty where all turns have `advantage`.
    """

    key: TrajectoryKey
    status: Status
    reward: float
    advantage: float
    weights: tuple[float, ...]
    num_turn_tokens: int
    oldest_version: int | None
    newest_version: int | None
    has_logprobs: bool
    sequences: tuple[SequenceShape, ...]
    payload_crcs: tuple[int, ...]
    is_masked: bool = False
    turn_advantages: tuple[float, ...] = ()

    @property
    def left_out(self) -> set[int]:
        """The turns that are in no row."""
        return {*range(len(self.payload_crcs))}.difference(*[row.turns for row in self.sequences])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One group of a batch, its members in order of (sample, attempt)."""

    group_id: str
    prompt_uid: str
    trajectories: tuple[TrajectoryPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchPlan:
    """Groups of one optimizer update, and what its loss is divided by.

    Attributes:
        first_group, num_groups: which groups of the batch.
        first_row_id: row id of the first row; rows are numbered in order through all batches.
        width: the longest row, in tokens.
        response_width: the longest response, in tokens.
    """

    first_group: int
    num_groups: int
    first_row_id: int
    num_rows: int
    width: int
    response_width: int
    denominators: Denominators


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The immutable plan of one batch.

    Attributes:
        step: number of the batch, from 1.
        revision: 0, or a higher number where damaged plans of this step were withdrawn before.
        previous_hash: hex SHA-256 of the manifest before, "" for step 1: the chain.
        last_event_id: the event that completed the last group of this batch, or the BatchDue that
            it was chosen at.
        masked_versions: ascending; no token that one of them sampled is trained.
        figures: tags and metrics of its trajectories, summed up.
    """

    run: str
    step: int
    revision: int
    lineage: str
    previous_hash: str
    assembly_version: int
    config_revision: int
    last_event_id: str
    groups: tuple[GroupPlan, ...]
    mini_batches: tuple[MiniBatchPlan, ...]
    masked_versions: tuple[int, ...] = ()
    figures: Figures = field(default_factory=Figures)

    @property
    def num_trajectories(self) -> int:
        """Trajectories of all groups."""
        return sum(len(group.trajectories) for group in self.groups)

    @property
    def end_row_id(self) -> int:
        """The row id that the next batch begins with."""
        last = self.mini_batches[-1]
        return last.first_row_id + last.num_rows
