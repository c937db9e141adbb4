"""Statistics of a job: pure functions from its events, manifests and ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from rich.table import Table

from turnstream.batching.merge.plan import GroupPlan, Manifest
from turnstream.types import SealedTrajectory


class SealedFigures(NamedTuple):
    """Numbers of one sealed trajectory.

    Attributes:
        wire_bytes: bytes of its turn records, as they are stored.
        resend_bytes: the same records, did every turn carry its whole context.
    """

    reward: float
    num_turns: int
    wire_bytes: int
    resend_bytes: int


class BatchFigures(NamedTuple):
    """Numbers of one batch.

    Attributes:
        num_tokens: tokens of its rows.
        num_turn_tokens: tokens of its turns if each were sent with its whole context.
        num_positions: positions of its mini-batches in the left-padded layout.
    """

    step: int
    num_sequences: int
    num_tokens: int
    num_turn_tokens: int
    num_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The statistics of a job.

    Attributes:
        groups: opened groups.
        trajectories: accepted; equals the sum of `ledger`.
        turns: turns of the sealed trajectories.
        sequences: trained rows.
        batches: planned batches.
        steps: batches that the trainer acknowledged.
        merge_ratio: tokens of the trained turns sent one by one / tokens of the trained rows.
        padding_share: padding positions of the trained mini-batches, left-padded, 0 to 1.
        wire_bytes, resend_bytes: sums of the sealed trajectories, see SealedFigures.
        tokens_per_s: tokens of the trained rows / seconds.
        reward_first_tenth, reward_last_tenth: mean over the sealed trajectories, in the order of
            their seals; None before the first.
        ledger: number of trajectories by state, only states that occur.
    """

    groups: int
    trajectories: int
    turns: int
    sequences: int
    batches: int
    steps: int
    merge_ratio: float
    padding_share: float
    wire_bytes: int
    resend_bytes: int
    tokens_per_s: float
    reward_first_tenth: float | None
    reward_last_tenth: float | None
    ledger: Mapping[str, int]

    def to_json(self) -> str:
        """One JSON object, a key per attribute."""
        return json.dumps(asdict(self), indent=2) + "\n"


def figures_of_sealed(sealed: SealedTrajectory) -> SealedFigures:
    """The figures of a trajectory, from its seal."""
    shared_tokens = sum(turn.shared_tokens for turn in sealed.turns)
    return SealedFigures(
        reward=_reward(sealed),
        num_turns=len(sealed.turns),
        wire_bytes=sealed.num_payload_bytes,
        resend_bytes=sealed.num_payload_bytes + 4 * shared_tokens,  # token ids are int32
    )


def figures_of_batch(manifest: Manifest) -> BatchFigures:
    """The figures of a batch, from its manifest."""
    num_positions = sum(cut.num_rows * cut.width for cut in manifest.mini_batches)
    return BatchFigures(
        step=manifest.step,
        num_sequences=sum(cut.num_rows for cut in manifest.mini_batches),
        num_tokens=sum(_num_tokens(group) for group in manifest.groups),
        num_turn_tokens=sum(
            planned.num_turn_tokens for group in manifest.groups for planned in group.trajectories
        ),
        num_positions=num_positions,
    )


def summarise(
    *,
    num_groups: int,
    sealed: Sequence[SealedFigures],
    batches: Sequence[BatchFigures],
    stepped: int,
    ledger: Mapping[str, int],
    elapsed_s: float,
) -> Summary:
    """All figures of a job."""
    trained = [batch for batch in batches if batch.step <= stepped]
    num_tokens = sum(batch.num_tokens for batch in trained)
    num_positions = sum(batch.num_positions for batch in trained)
    first, last = reward_tenths([figures.reward for figures in sealed])
    return Summary(
        groups=num_groups,
        trajectories=sum(ledger.values()),
        turns=sum(figures.num_turns for figures in sealed),
        sequences=sum(batch.num_sequences for batch in trained),
        batches=len(batches),
        steps=stepped,
        merge_ratio=_ratio(sum(batch.num_turn_tokens for batch in trained), num_tokens),
        padding_share=_ratio(num_positions - num_tokens, num_positions),
        wire_bytes=sum(figures.wire_bytes for figures in sealed),
        resend_bytes=sum(figures.resend_bytes for figures in sealed),
        tokens_per_s=_ratio(num_tokens, elapsed_s),
        reward_first_tenth=first,
        reward_last_tenth=last,
        ledger={state: count for state, count in ledger.items() if count},
    )


def reward_tenths(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean of the first and of the last tenth, rounded up to at least one reward each.

    >>> reward_tenths([0.0, 1.0] + [0.5] * 17 + [1.0])
    (0.5, 0.75)
    """
    if not rewards:
        return None, None
    size = -(-len(rewards) // 10)
    return sum(rewards[:size]) / size, sum(rewards[-size:]) / size


def summary_table(summary: Summary, *, title: str) -> Table:
    """The summary for people."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name in ("groups", "trajectories", "turns", "sequences", "batches", "steps"):
        table.add_row(name, f"{getattr(summary, name):,}")
    table.add_section()
    table.add_row("merge ratio", f"{summary.merge_ratio:.2f}")
    table.add_row("padding share", f"{summary.padding_share:.1%}")
    saved = _ratio(summary.resend_bytes, summary.wire_bytes)
    table.add_row("bytes sent", f"{summary.wire_bytes:,}")
    table.add_row("bytes if re-sent", f"{summary.resend_bytes:,} ({saved:.2f} x)")
    table.add_row("tokens/s", f"{summary.tokens_per_s:,.0f}")
    table.add_section()
    table.add_row("reward, first tenth", _shown(summary.reward_first_tenth))
    table.add_row("reward, last tenth", _shown(summary.reward_last_tenth))
    table.add_section()
    for state, count in summary.ledger.items():
        table.add_row(f"ledger: {state}", f"{count:,}")
    return table


def _reward(sealed: SealedTrajectory) -> float:
    if sealed.reward is not None:
        return sealed.reward
    if sealed.reward_components:
        return sum(sealed.reward_components.values())
    return sum(sealed.turn_rewards)


def _num_tokens(group: GroupPlan) -> int:
    return sum(row.num_tokens for planned in group.trajectories for row in planned.sequences)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _shown(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"
