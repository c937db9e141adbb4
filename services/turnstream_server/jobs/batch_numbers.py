"""Sizes of planned batches: padding, merging, tokens, versions. Pure functions of manifests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnstream.batching.merge.plan import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNumbers:
    """Numbers of one or several batches.

    Attributes:
        num_groups: groups of all batches.
        num_trajectories: trajectories of all groups.
        num_rows: merged sequences.
        num_tokens: tokens of all rows.
        num_trained_tokens: response tokens with mask 1.
        padding_share: padding positions / all positions, left-padded to the longest row of each
            mini-batch; 0 to 1.
        merge_ratio: tokens of the turns, sent one by one / tokens of the rows; at least 1.
        mean_reward: mean over the trajectories; None without any.
        oldest_version, newest_version: policy versions that sampled them; None if not known.
    """

    num_groups: int
    num_trajectories: int
    num_rows: int
    num_tokens: int
    num_trained_tokens: int
    padding_share: float
    merge_ratio: float
    mean_reward: float | None
    oldest_version: int | None
    newest_version: int | None

    @property
    def versions(self) -> str:
        """The range of policy versions.

        >>> numbers_of([]).versions
        'unknown'
        """
        if self.oldest_version is None:
            return "unknown"
        if self.oldest_version == self.newest_version:
            return str(self.oldest_version)
        return f"{self.oldest_version} to {self.newest_version}"

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) for people."""
        reward = "none" if self.mean_reward is None else f"{self.mean_reward:.3f}"
        return [
            ("groups", f"{self.num_groups:,} with {self.num_trajectories:,} trajectories"),
            ("tokens", f"{self.num_tokens:,} in {self.num_rows:,} rows"),
            ("trained tokens", f"{self.num_trained_tokens:,}"),
            ("padding share", f"{self.padding_share:.1%}"),
            ("merge ratio", f"{self.merge_ratio:.2f}"),
            ("policy versions", self.versions),
            ("mean reward", reward),
        ]


def numbers_of(manifests: Sequence[Manifest]) -> BatchNumbers:
    """Return the numbers of these batches together.

    >>> numbers_of([]).merge_ratio
    1.0
    """
    trajectories = [
        planned
        for manifest in manifests
        for group in manifest.groups
        for planned in group.trajectories
    ]
    rows = [row for planned in trajectories for row in planned.sequences]
    cuts = [cut for manifest in manifests for cut in manifest.mini_batches]
    num_tokens = sum(row.num_tokens for row in rows)
    num_positions = sum(cut.num_rows * cut.width for cut in cuts)
    oldest = [each.oldest_version for each in trajectories if each.oldest_version is not None]
    newest = [each.newest_version for each in trajectories if each.newest_version is not None]
    num_turn_tokens = sum(planned.num_turn_tokens for planned in trajectories)
    rewards = [planned.reward for planned in trajectories]
    return BatchNumbers(
        num_groups=sum(len(manifest.groups) for manifest in manifests),
        num_trajectories=len(trajectories),
        num_rows=len(rows),
        num_tokens=num_tokens,
        num_trained_tokens=sum(row.num_trained_tokens for row in rows),
        padding_share=(num_positions - num_tokens) / num_positions if num_positions else 0.0,
        merge_ratio=num_turn_tokens / num_tokens if num_tokens else 1.0,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        oldest_version=min(oldest, default=None),
        newest_version=max(newest, default=None),
    )
