"""Statistics of a job: pure functions from its events, manifests and ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from turnstream.types import SealedTrajectory
from turnstream_server.bus.queries.batch_numbers import BatchNumbers, mean, ratio


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
        merge_ratio=ratio(sum(batch.num_turn_tokens for batch in batches), num_tokens),
        padding_share=ratio(num_positions - num_tokens, num_positions),
        wire_bytes=wire_bytes,
        resend_bytes=wire_bytes + 4 * shared_tokens,  # token ids are int32
        tokens_per_s=ratio(num_tokens, elapsed_s),
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
    return mean(rewards[:size]), mean(rewards[-size:])


def summary_table(summary: Summary, *, title: str) -> Table:
    """Return the summary as a table."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    saved = ratio(summary.resend_bytes, summary.wire_bytes)
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


def _shown(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"
