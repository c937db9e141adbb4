"""Reports: the result of merging, the first mismatch of turns, and oddities of a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from turnstream.batching.config import BatchingConfig
from turnstream.batching.merge.merging import plan_sequences
from turnstream.batching.merge.plan import Manifest
from turnstream.batching.packing.microbatch import Budget
from turnstream.types import NO_PARENT, StoredTurn, TrajectoryKey, TurnShape


class MergeBreak(NamedTuple):
    """The first turn of a trajectory that does not continue the end of a row.

    Attributes:
        turn: the one that begins a new row.
        compared_with: the turn that holds the longest beginning of its prompt; the turn before,
            where nothing is shared.
        position: first difference, in tokens of the prompt. The tokens of `compared_with` end there
            if another turn continued them before (a branch), the prompt if it was shortened.
    """

    key: TrajectoryKey
    turn: int
    compared_with: int
    position: int


Payload = Mapping[TrajectoryKey, Sequence[StoredTurn]]
LeftOut = Mapping[TrajectoryKey, Collection[int]]


def merge_counts(payload: Payload, left_out: LeftOut = MappingProxyType({})) -> dict[str, float]:
    """Return the numbers of turns, rows and tokens of merged trajectories, by name.

    Turns that are left out count as turns only. The `merge_ratio` is the tokens sent turn by turn /
    the tokens of the rows; 1.0 without tokens.
    """
    shapes = [_shapes(turns, left_out.get(key, ())) for key, turns in payload.items()]
    rows = [row for turns in shapes for row in plan_sequences(turns, merge=True)]
    num_turn_tokens = sum(
        turn.num_tokens for turns in shapes for turn in turns if not turn.is_left_out
    )
    num_row_tokens = sum(row.num_tokens for row in rows)
    return {
        "num_trajectories": len(shapes),
        "num_turns": sum(map(len, shapes)),
        "num_rows": len(rows),
        "num_turn_tokens": num_turn_tokens,
        "num_row_tokens": num_row_tokens,
        "merge_ratio": num_turn_tokens / num_row_tokens if num_row_tokens else 1.0,
    }


def _shapes(turns: Sequence[StoredTurn], left_out: Collection[int]) -> list[TurnShape]:
    return [turn.shape._replace(is_left_out=turn.index in left_out) for turn in turns]


def merge_breaks(
    payload: Payload, left_out: LeftOut = MappingProxyType({})
) -> Iterator[MergeBreak]:
    """Yield the first mismatch of every trajectory of more than one row, in their order."""
    for key, turns in payload.items():
        rows = plan_sequences(_shapes(turns, left_out.get(key, ())), merge=True)
        if len(rows) > 1:
            broken = turns[rows[1].turns[0]]
            parent = broken.index - 1 if broken.parent_turn == NO_PARENT else broken.parent_turn
            yield MergeBreak(key, broken.index, parent, broken.shared_tokens)


_COMPARES_NO_GROUP = ("reinforce_pp", "gae")
"""Estimators whose advantage in a group of one is that in any group."""


def plan_warnings(
    manifest: Manifest, config: BatchingConfig, *, announced: Collection[int] = ()
) -> dict[str, str]:
    """Return a sentence for each oddity of a batch; none of these is cut, dropped or refused.

    `announced` are the versions that the trainer has announced. A run may announce none.

    A group of one is no oddity where the run trains its raw reward, or compares the whole batch.
    Untrained rows are in no denominator; those of trajectories that the run masks are no oddity.
    """
    cuts = manifest.mini_batches
    longest = max((cut.width for cut in cuts), default=0)
    compares_groups = (
        config.singleton_advantage == "zero" and config.estimator not in _COMPARES_NO_GROUP
    )
    counts = {
        "groups of one trajectory, which get an advantage of 0": sum(
            compares_groups and len(group.trajectories) == 1 for group in manifest.groups
        ),
        "rows without a trained token": _num_untrained_rows(manifest),
        "updates without a trained token, which change nothing": sum(
            cut.denominators.num_tokens == 0 for cut in cuts
        ),
        "rows above max_tokens_per_micro_batch, each in a pass of its own": _num_rows_above(
            manifest, config.budget, longest=longest
        ),
        "trajectories of versions that were never announced, whose age is not known": (
            _num_unannounced(manifest, announced) if announced else 0
        ),
    }
    return {kind: f"{kind}: {count}" for kind, count in counts.items() if count}


def _num_unannounced(manifest: Manifest, announced: Collection[int]) -> int:
    known = {None, *announced}
    return sum(
        not {trajectory.oldest_version, trajectory.newest_version} <= known
        for group in manifest.groups
        for trajectory in group.trajectories
    )


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
