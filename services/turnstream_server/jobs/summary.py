"""Statistics of a job: pure functions from its events, manifests and ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from turnstream.batching.merge.plan import Manifest
from turnstream.types import SealedTrajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNumbers:
    """Numbers of one batch.

    Attributes:
        num_rows: merged sequences.
        num_tokens: tokens of all rows.
        num_turn_tokens: tokens of its turns if each were sent with its whole context.
        num_positions: positions of its mini-batches in the left-padded layout.
        num_trained_tokens: response tokens with mask 1.
        padding_share: padding positions / all positions, 0 to 1.
        merge_ratio: tokens of the turns / tokens of the rows; at least 1.
        mean_reward: mean over the trajectories; None without any.
        oldest_version, newest_version: policy versions that sampled them; None if not known.
    """

    num_groups: int
    num_trajectories: int
    num_rows: int
    num_tokens: int
    num_turn_tokens: int
    num_positions: int
    num_trained_tokens: int
    padding_share: float
    merge_ratio: float
    mean_reward: float | None
    oldest_version: int | None
    newest_version: int | None

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) for people."""
        versions = "unknown"
        if self.oldest_version is not None:
            versions = f"{self.oldest_version} to {self.newest_version}"
        if self.oldest_version == self.newest_version is not None:
            versions = str(self.newest_version)
        return [
            ("groups", f"{self.num_groups:,} with {self.num_trajectories:,} trajectories"),
            ("tokens", f"{self.num_tokens:,} in {self.num_rows:,} rows"),
            ("trained tokens", f"{self.num_trained_tokens:,}"),
            ("padding share", f"{self.padding_share:.1%}"),
            ("merge ratio", f"{self.merge_ratio:.2f}"),
            ("policy versions", versions),
            ("mean reward", _shown(self.mean_reward)),
        ]


def numbers_of(manifest: Manifest) -> BatchNumbers:
    """Return the numbers of a planned batch."""
    trajectories = [planned for group in manifest.groups for planned in group.trajectories]
    rows = [row for planned in trajectories for row in planned.sequences]
    num_tokens = sum(row.num_tokens for row in rows)
    num_turn_tokens = sum(planned.num_turn_tokens for planned in trajectories)
    num_positions = sum(cut.num_rows * cut.width for cut in manifest.mini_batches)
    oldest = [each.oldest_version for each in trajectories if each.oldest_version is not None]
    newest = [each.newest_version for each in trajectories if each.newest_version is not None]
    rewards = [planned.reward for planned in trajectories]
    return BatchNumbers(
        num_groups=len(manifest.groups),
        num_trajectories=len(trajectories),
        num_rows=len(rows),
        num_tokens=num_tokens,
        num_turn_tokens=num_turn_tokens,
        num_positions=num_positions,
        num_trained_tokens=sum(row.num_trained_tokens for row in rows),
        padding_share=_ratio(num_positions - num_tokens, num_positions),
        merge_ratio=num_turn_tokens / num_tokens if num_tokens else 1.0,
        mean_reward=_mean(rewards),
        oldest_version=min(oldest, default=None),
        newest_version=max(newest, default=None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The statistics of a job.

    Attributes:
        trajectories: accepted; equals the sum of `ledger`.
        turns: turns of the sealed trajectories.
        sequences: trained rows.
        batches, steps: planned batches, and those that the trainer acknowledged.
        merge_ratio: tokens of the trained turns sent one by one / tokens of the trained rows.
        padding_share: padding positions of the trained mini-batches, left-padded, 0 to 1.
        wire_bytes: stored turn records of the sealed trajectories.
        resend_bytes: the same records, if every turn had its whole context.
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
        """Return one JSON object, a key per attribute."""
        return json.dumps(asdict(self), indent=2) + "\n"


def summarise(
    *,
    num_groups: int,
    sealed: Sequence[SealedTrajectory],
    batches: Sequence[BatchNumbers],
    planned: int,
    stepped: int,
    ledger: Mapping[str, int],
    elapsed_s: float,
) -> Summary:
    """Return the statistics of a job; `batches` are the trained ones."""
    num_tokens = sum(batch.num_tokens for batch in batches)
    num_positions = sum(batch.num_positions for batch in batches)
    wire_bytes = sum(each.num_payload_bytes for each in sealed)
    shared_tokens = sum(turn.shared_tokens for each in sealed for turn in each.turns)
    first, last = reward_tenths([each.reward or 0.0 for each in sealed])
    return Summary(
        groups=num_groups,
        trajectories=sum(ledger.values()),
        turns=sum(len(each.turns) for each in sealed),
        sequences=sum(batch.num_rows for batch in batches),
        batches=planned,
        steps=stepped,
        merge_ratio=_ratio(sum(batch.num_turn_tokens for batch in batches), num_tokens),
        padding_share=_ratio(num_positions - num_tokens, num_positions),
        wire_bytes=wire_bytes,
        resend_bytes=wire_bytes + 4 * shared_tokens,  # token ids are int32
        tokens_per_s=_ratio(num_tokens, elapsed_s),
        reward_first_tenth=first,
        reward_last_tenth=last,
        ledger={state: count for state, count in ledger.items() if count},
    )


def reward_tenths(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean of the first and of the last tenth, rounded up to at least one reward each.

    >>> reward_tenths([0.0, 1.0] + [0.5] * 17 + [1.0])
    (0.5, 0.75)
    """
    size = -(-len(rewards) // 10)
    return _mean(rewards[:size]), _mean(rewards[-size:])


def summary_table(summary: Summary, *, title: str) -> Table:
    """Return the summary as a table."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    saved = _ratio(summary.resend_bytes, summary.wire_bytes)
    counts = ("groups", "trajectories", "turns", "sequences", "batches", "steps")
    for rows in (
        [(name, f"{getattr(summary, name):,}") for name in counts],
        [
            ("merge ratio", f"{summary.merge_ratio:.2f}"),
            ("padding share", f"{summary.padding_share:.1%}"),
            ("bytes sent", f"{summary.wire_bytes:,}"),
            ("bytes if re-sent", f"{summary.resend_bytes:,} ({saved:.2f} x)"),
            ("tokens/s", f"{summary.tokens_per_s:,.0f}"),
        ],
        [
            ("reward, first tenth", _shown(summary.reward_first_tenth)),
            ("reward, last tenth", _shown(summary.reward_last_tenth)),
        ],
        [(f"ledger: {state}", f"{count:,}") for state, count in summary.ledger.items()],
    ):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _mean(rewards: Sequence[float]) -> float | None:
    return sum(rewards) / len(rewards) if rewards else None


def _shown(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"
