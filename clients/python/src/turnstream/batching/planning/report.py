"""Reports: the result of merging, the first mismatch of turns, and oddities of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from turnstream.batching.config import BatchingConfig
from turnstream.batching.merge.merging import plan_sequences
from turnstream.batching.merge.plan import Manifest
from turnstream.batching.packing.microbatch import Budget
from turnstream.types import NO_PARENT, StoredTurn, TrajectoryKey


class MergeBreak(NamedTuple):
    """The first turn of a trajectory that does not continue the end of a row.

    Attributes:
        key: name of the trajectory.
        turn: the one that begins a new row.
        compared_with: the turn that holds the longest beginning of its prompt; the turn before,
            where nothing is shared.
        position: first difference, in tokens of the prompt.
        expected: token id of `compared_with` there; None where its tokens end: then the context
            was kept whole, and another turn continued it before (a branch).
        found: token id of the prompt there; None where the prompt ends: it was shortened.
    """

    key: TrajectoryKey
    turn: int
    compared_with: int
    position: int
    expected: int | None
    found: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """Turns, rows and tokens of some merged trajectories.

    Attributes:
        num_turn_tokens: tokens of all turns, each with its full prompt.
        num_row_tokens: tokens of the rows.
        breaks: one for every trajectory of more than one row, in their order.
    """

    num_trajectories: int
    num_turns: int
    num_rows: int
    num_turn_tokens: int
    num_row_tokens: int
    breaks: tuple[MergeBreak, ...]

    @property
    def merge_ratio(self) -> float:
        """Tokens sent turn by turn / tokens of the rows; 1.0 where there is nothing."""
        return self.num_turn_tokens / self.num_row_tokens if self.num_row_tokens else 1.0


def merge_report(trajectories: Mapping[TrajectoryKey, Sequence[StoredTurn]]) -> MergeReport:
    """Count turns, rows and tokens, and find the first mismatch of every broken trajectory."""
    shapes = {key: [turn.shape for turn in turns] for key, turns in trajectories.items()}
    rows = {key: plan_sequences(turns, merge=True) for key, turns in shapes.items()}
    return MergeReport(
        num_trajectories=len(rows),
        num_turns=sum(len(turns) for turns in shapes.values()),
        num_rows=sum(len(own) for own in rows.values()),
        num_turn_tokens=sum(turn.num_tokens for turns in shapes.values() for turn in turns),
        num_row_tokens=sum(row.num_tokens for own in rows.values() for row in own),
        breaks=tuple(
            _break(key, trajectories[key], turn=own[1].turns[0])
            for key, own in rows.items()
            if len(own) > 1
        ),
    )


def plan_warnings(manifest: Manifest, config: BatchingConfig) -> dict[str, str]:
    """Return a sentence for each oddity of a batch; none of these is cut, dropped or refused.

    A group of one is no oddity where the run trains its raw reward, or compares the whole batch.
    Untrained rows are in no denominator; those of trajectories that the run masks are no oddity.
    """
    cuts = manifest.mini_batches
    longest = max((cut.width for cut in cuts), default=0)
    compares_groups = config.singleton_advantage == "zero" and config.estimator != "reinforce_pp"
    counts = {
        "groups of one trajectory, which get an advantage of 0": (
            manifest.num_singleton_groups if compares_groups else 0
        ),
        "rows without a trained token": _num_untrained_rows(manifest),
        "updates without a trained token, which change nothing": sum(
            cut.denominators.num_tokens == 0 for cut in cuts
        ),
        "rows above max_tokens_per_micro_batch, each in a pass of its own": _num_rows_above(
            manifest, config.budget, longest=longest
        ),
    }
    return {kind: f"{kind}: {count}" for kind, count in counts.items() if count}


def _num_untrained_rows(manifest: Manifest) -> int:
    return sum(
        row.num_trained_tokens == 0
        for group in manifest.groups
        for trajectory in group.trajectories
        if not trajectory.is_masked
        for row in trajectory.sequences
    )


def _num_rows_above(manifest: Manifest, budget: Budget, *, longest: int) -> int:
    if not 0 < budget.limit < budget.cost([longest]):
        return 0
    return sum(
        budget.cost([row.num_tokens]) > budget.limit
        for group in manifest.groups
        for trajectory in group.trajectories
        for row in trajectory.sequences
    )


def _break(key: TrajectoryKey, stored: Sequence[StoredTurn], *, turn: int) -> MergeBreak:
    broken = stored[turn]
    compared_with = turn - 1 if broken.parent_turn == NO_PARENT else broken.parent_turn
    position = broken.shared_tokens
    new_prompt_ids = broken.new_prompt_ids
    return MergeBreak(
        key=key,
        turn=turn,
        compared_with=compared_with,
        position=position,
        expected=_token_at(stored, compared_with, position),
        found=int(new_prompt_ids[0]) if len(new_prompt_ids) else None,
    )


def _token_at(stored: Sequence[StoredTurn], index: int, position: int) -> int | None:
    """Return the token at this place of a turn; None after its end."""
    while position < stored[index].shared_tokens:
        index = stored[index].parent_turn
    turn = stored[index]
    place = position - turn.shared_tokens
    return int(turn.token_ids[place]) if place < len(turn.token_ids) else None
