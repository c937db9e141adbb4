"""What a publisher did so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherStatistics:
    """Counts since the publisher was made.

    Attributes:
        num_trajectories: trajectories sealed and acknowledged.
        num_abandoned: trajectories given up.
        num_turns: turns acknowledged.
        wire_bytes: bytes of the acknowledged turn records.
        resend_bytes: what they would be if each turn carried its full context.
        turn_tokens: prompt + response, summed over the turns.
        merged_tokens: tokens of the rows that the turns merge to.
        num_duplicates: records that the store had already, from a call whose answer was lost, or
            from before a restart.
        num_retries: how often a call had to be repeated because the store was away or full.
        num_waits: how often a group had to wait for leave to start.
        wait_s: seconds of those waits.
        num_restarts: how often another start of the store answered than before, which may have lost
            writes, so that they were sent again.
        num_resent: turns that were sent again then, and acknowledged again.
        num_lost: ended trajectories, and posted rewards, that a store forgot for good.
        num_forgotten: turns that were kept for less than `keep_s`, for want of room.
        kept_bytes: acknowledged, and kept to be sent again.
        max_kept_bytes: the bound of that.
        inflight_bytes: accepted and not yet acknowledged.
        max_inflight_bytes: the bound of that.
    """

    num_trajectories: int = 0
    num_abandoned: int = 0
    num_turns: int = 0
    wire_bytes: int = 0
    resend_bytes: int = 0
    turn_tokens: int = 0
    merged_tokens: int = 0
    num_duplicates: int = 0
    num_retries: int = 0
    num_waits: int = 0
    wait_s: float = 0.0
    num_restarts: int = 0
    num_resent: int = 0
    num_lost: int = 0
    num_forgotten: int = 0
    kept_bytes: int = 0
    max_kept_bytes: int = 0
    inflight_bytes: int = 0
    max_inflight_bytes: int = 0
