"""The numbers of planned batches. The HTTP API describes them with the words of this class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from turnstream.batching.merge.plan import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNumbers:
    """Numbers of one batch."""

    num_groups: int
    num_trajectories: int
    num_rows: Annotated[int, Field(description="Merged sequences.")]
    num_tokens: Annotated[int, Field(description="Tokens of all rows.")]
    num_turn_tokens: Annotated[
        int, Field(description="Tokens of all turns, each with its whole prompt.")
    ]
    num_positions: Annotated[int, Field(description="Positions of the left-padded mini-batches.")]
    num_trained_tokens: Annotated[int, Field(description="Response tokens with mask 1.")]
    padding_share: Annotated[float, Field(description="Part of the positions, 0 to 1.")]
    merge_ratio: Annotated[float, Field(description="Tokens of turns / tokens of rows.")]
    mean_reward: Annotated[float | None, Field(description="Mean over the trajectories.")]
    oldest_version: Annotated[int | None, Field(description="Null if it is not known.")]
    newest_version: Annotated[int | None, Field(description="Null if it is not known.")]

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
            ("mean reward", "-" if self.mean_reward is None else f"{self.mean_reward:.3f}"),
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
        padding_share=ratio(num_positions - num_tokens, num_positions),
        merge_ratio=num_turn_tokens / num_tokens if num_tokens else 1.0,
        mean_reward=mean(rewards),
        oldest_version=min(oldest, default=None),
        newest_version=max(newest, default=None),
    )


def ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 without a whole."""
    return part / whole if whole else 0.0


def mean(rewards: Sequence[float]) -> float | None:
    """Return the mean; None without rewards."""
    return sum(rewards) / len(rewards) if rewards else None
