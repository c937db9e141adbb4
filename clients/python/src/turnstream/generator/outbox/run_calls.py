"""Calls for which no other call waits: rewards, the closing of the run, its configuration.

No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from turnstream.errors import RejectedError, TurnstreamError
from turnstream.generator.outbox.receipts import PendingWrite
from turnstream.generator.outbox.trajectories import TrajectoryTracker
from turnstream.generator.outbox.writes import Call, RunCall, drained
from turnstream.generator.requests import CloseRun, PostReward, ReadConfig
from turnstream.store.client.replies import Refusal
from turnstream.store.run.configs import parse_config
from turnstream.store.run.rewards import LEFT, RewardOutcome, outcome_of
from turnstream.types import DeclaredColumn

_REPOST_EVERY_S: Final = 0.5


@dataclass(slots=True, eq=False)
class RewardPost:
    """A reward that is posted for a trajectory of any generator.

    Attributes:
        trajectory_id: the trajectory.
        receipt: receipt of the first answer.
        outcome: the last answer.
        until_s: until when it is posted again, if a restarted store lacks the trajectory.
    """

    trajectory_id: str
    receipt: PendingWrite
    outcome: str = ""
    until_s: float | None = None


class RunCalls:
    """The calls of one publisher that belong to its run.

    Args:
        timeout_s: how long a reward is posted again while a restarted store lacks its trajectory.

    Attributes:
        extra_columns: declared columns of the run; None before they were read.
    """

    def __init__(self, tracker: TrajectoryTracker, *, timeout_s: float) -> None:
        self.extra_columns: tuple[DeclaredColumn, ...] | None = None
        self._tracker = tracker
        self._queue = tracker.send_queues.of_run
        self._timeout_s = timeout_s
        self._reposts: list[RunCall] = []
        self._reposts_due_s = 0.0

    def queue_reposts(self, now_s: float) -> None:
        """Queue the rewards that are to be posted again now."""
        if now_s >= self._reposts_due_s:
            self._queue.extend(self._reposts)
            self._reposts = []

    def take(self) -> list[Call]:
        """Return the calls to send now."""
        run = self._tracker.run
        return [
            Call(
                each.request._replace(run=run),
                each.accept,
                each.refuse,
                partial(self._queue.appendleft, each),
            )
            for each in drained(self._queue)
        ]

    @property
    def is_settled(self) -> bool:
        """Whether no reward waits to be posted again."""
        return not self._reposts

    def pause_s(self, now_s: float) -> float | None:
        """Seconds until a reward is posted again; None if none waits."""
        return max(0.0, self._reposts_due_s - now_s) if self._reposts else None

    def close_run(self, reason: str, receipt: PendingWrite) -> None:
        """Close the run to new groups."""

        def closed(_: object, now_s: float) -> None:
            receipt.settle(None)
            self._tracker.resend_buffer.keep(call, now_s=now_s)

        call = RunCall(
            CloseRun(self._tracker.run, reason),
            closed,
            partial(_refuse, receipt),
            receipt,
            "the closing of the run",
        )
        self._queue.append(call)

    def learn_columns(self, receipt: PendingWrite) -> None:
        """Read what the run declares."""
        call = RunCall(
            ReadConfig(self._tracker.run),
            partial(self._accept_config, receipt),
            partial(_refuse, receipt),
            receipt,
            "the read of the configuration",
        )
        self._queue.append(call)

    def post_reward(self, trajectory_id: str, record: bytes, receipt: PendingWrite) -> RewardPost:
        """Post a reward; the answer settles its receipt."""
        post = RewardPost(trajectory_id, receipt)
        call = RunCall(
            PostReward(self._tracker.run, trajectory_id, record),
            lambda answer, now_s: self._accept_reward(call, post, answer, now_s),
            lambda refused, now_s: self._refuse_reward(call, post, refused.error, now_s),
            post.receipt,
            f"the reward of {trajectory_id}",
        )
        self._queue.append(call)
        return post

    def _accept_config(self, receipt: PendingWrite, answer: Sequence[bytes], _: float) -> None:
        try:
            self.extra_columns = parse_config(answer, run=self._tracker.run)[1].extra_columns
        except TurnstreamError as error:
            receipt.settle(None, error)
        else:
            receipt.settle(None)

    def _accept_reward(self, call: RunCall, post: RewardPost, answer: bytes, now_s: float) -> None:
        before, outcome = post.outcome, outcome_of(answer)
        post.outcome = outcome
        self._tracker.resend_buffer.keep(call, now_s=now_s)
        post.receipt.settle(None)
        if before and outcome == RewardOutcome.LATE != before and answer != LEFT:
            error = RejectedError(f"the group of {post.trajectory_id} went on without it")
            self._tracker.lose("a reward", error)

    def _refuse_reward(
        self, call: RunCall, post: RewardPost, error: TurnstreamError, now_s: float
    ) -> None:
        """Report a refused reward; after a restart, post it until its trajectory is there again."""
        if not post.outcome:
            post.receipt.settle(None, error)
            return
        if post.until_s is None:
            post.until_s = now_s + self._timeout_s
        if now_s >= post.until_s:
            self._tracker.lose("a reward", error)
            return
        self._reposts.append(call)
        self._reposts_due_s = now_s + _REPOST_EVERY_S


def _refuse(receipt: PendingWrite, refused: Refusal, _: float) -> None:
    receipt.settle(None, refused.error)
