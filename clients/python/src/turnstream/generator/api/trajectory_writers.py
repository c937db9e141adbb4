"""A trajectory being written, for threads and for asyncio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from turnstream.generator.api.trajectory_core import TrajectoryWriterBase
from turnstream.generator.encode.checks import checked_turn
from turnstream.generator.encode.group_checks import checked_status
from turnstream.generator.outbox.receipts import AsyncReceipt, Receipt
from turnstream.generator.transport.sender import Sender
from turnstream.generator.transport.thread_sender import ThreadSender
from turnstream.types import Anchor, Siblings, Status, VersionRun


class TrajectoryWriter(TrajectoryWriterBase[ThreadSender, Receipt]):
    """A trajectory being written; a context manager. Made by `Publisher` and `GroupWriter`.

    Leaving it by an exception, or without `seal`, abandons the trajectory. Several threads may
    append: the turns are numbered here.
    """

    def __enter__(self) -> Self:
        self._sender.run(self._enter())
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._abandon_unsealed(error)

    def append(
        self,
        prompt_ids: Any,
        response_ids: Any,
        *,
        logprobs: Any = None,
        loss_mask: Any = None,
        token_weights: Any = None,
        rewards: Any = None,
        reward: float | None = None,
        policy_version: int | None = None,
        version_runs: Sequence[VersionRun] = (),
        extras: Mapping[str, Any] | None = None,
        anchor: Anchor | None = None,
        call_id: str | None = None,
        allow_empty: bool = False,
        status: Status | str = Status.COMPLETED,
    ) -> Receipt:
        """Send one turn, and return before the store has answered.

        Args:
            prompt_ids: every token that the model saw, those of earlier turns included. Tokens of
                earlier turns are recognised and not sent again.
            response_ids: the sampled tokens.
            logprobs: one per response token, in nats, under the sampling policy.
            loss_mask: one per response token, 1 where it is trained; None trains all. Numbers
                between 0 and 1 are `token_weights`, and train every token above 0.
            token_weights: one per response token, at least 0: the factor of the token's loss; None
                weighs all with 1. The denominators count a trained token once, whatever its weight.
            rewards: one per response token; None for none.
            reward: one of the whole turn in place of `rewards`, for its last response token. A run
                reads it with `reward_source="sum_of_turns"` or `"last_turn"`.
            policy_version: the version of the weights that sampled the response.
            version_runs: (version, num_tokens) of each part, if several versions sampled it.
            extras: values of the declared extra columns by column, each for the whole turn as
                `prompt_ids` is: see `turnstream.types.extras`.
            anchor: the state of the environment when the turn began, for `estimator="gigpo"`: a
                text or bytes that are equal for equal states, or a hash of 64 bits.
            call_id: name of the model call, 1 to 64 printable ASCII characters. Another append with
                the same name sends nothing and returns the receipt of the first, also after the
                trajectory was adopted.
            allow_empty: accept a response without tokens.
            status: how the response ended; `seal` takes that of the last turn.

        Raises:
            InvalidTurnError: names field, value and position; nothing was accepted. Also for a turn
                with more than 8 MB of new tokens and columns.
            ConflictError: the turn of this `call_id` has another prompt or response.
            RejectedError: the trajectory has ended.
            TurnstreamError: the error of an earlier write of this trajectory.
        """
        turn = checked_turn(
            prompt_ids,
            response_ids,
            logprobs=logprobs,
            loss_mask=loss_mask,
            token_weights=token_weights,
            rewards=rewards,
            reward=reward,
            policy_version=policy_version,
            version_runs=version_runs,
            anchor=anchor,
            call_id=call_id,
            allow_empty=allow_empty,
        )
        status = checked_status(status)
        receipt = self._sender.receipt()
        sent = self._append_at_once(turn, extras, receipt)
        if sent is None:
            sent = self._sender.run(self._append(turn, extras, receipt))
        self._status = status
        return sent

    def seal(
        self,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
        status: Status | str | None = None,
        sampling: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        awaits_reward: bool = False,
        siblings: Siblings = "train",
    ) -> None:
        """End the trajectory and wait until the run has recorded it.

        Args:
            reward: outcome of the whole episode; None if the turns or the components carry it.
            reward_components: named rewards.
            status: how the episode ended; None takes the status of the last turn. A run excludes
                "error" by default, see `BatchingConfig.error_trajectories`. A failed start, with
                the status "error", needs no turn. It is never trained.
            sampling: parameters such as temperature.
            tags: labels, at most 64; each batch counts the trajectories of every value.
            metrics: finite numbers, at most 64; each batch has their means and extremes.
            awaits_reward: the reward, or some of its components, will be posted by `post_reward`,
                by any process. The group waits for it.
            siblings: treatment of a turn that no later prompt continues, while another turn with
                the same prompt is continued. "train" trains both, "mask" leaves the first out of
                the rows, "refuse" raises an error. See docs/branches.md.

        Raises:
            InvalidTurnError: a value is wrong, or the turn is missing; the trajectory is still
                open.
            TurnstreamError: the error of a write of this trajectory.
        """
        self._sender.run(
            self._seal(
                reward=reward,
                reward_components=reward_components,
                status=status,
                sampling=sampling,
                tags=tags,
                metrics=metrics,
                awaits_reward=awaits_reward,
                siblings=siblings,
            )
        )


class AsyncTrajectoryWriter(TrajectoryWriterBase[Sender[AsyncReceipt], AsyncReceipt]):
    """The same as `TrajectoryWriter`, made by `AsyncPublisher` and `AsyncGroupWriter`."""

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._abandon_unsealed(error)

    async def append(
        self,
        prompt_ids: Any,
        response_ids: Any,
        *,
        logprobs: Any = None,
        loss_mask: Any = None,
        token_weights: Any = None,
        rewards: Any = None,
        reward: float | None = None,
        policy_version: int | None = None,
        version_runs: Sequence[VersionRun] = (),
        extras: Mapping[str, Any] | None = None,
        anchor: Anchor | None = None,
        call_id: str | None = None,
        allow_empty: bool = False,
        status: Status | str = Status.COMPLETED,
    ) -> AsyncReceipt:
        """Send one turn; return before the store has answered. See `TrajectoryWriter.append`."""
        turn = checked_turn(
            prompt_ids,
            response_ids,
            logprobs=logprobs,
            loss_mask=loss_mask,
            token_weights=token_weights,
            rewards=rewards,
            reward=reward,
            policy_version=policy_version,
            version_runs=version_runs,
            anchor=anchor,
            call_id=call_id,
            allow_empty=allow_empty,
        )
        status = checked_status(status)
        receipt = self._sender.receipt()
        receipt = await self._append(turn, extras, receipt)
        self._status = status
        return receipt

    async def seal(
        self,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
        status: Status | str | None = None,
        sampling: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        awaits_reward: bool = False,
        siblings: Siblings = "train",
    ) -> None:
        """End the trajectory and wait until the run has it. See `TrajectoryWriter.seal`."""
        await self._seal(
            reward=reward,
            reward_components=reward_components,
            status=status,
            sampling=sampling,
            tags=tags,
            metrics=metrics,
            awaits_reward=awaits_reward,
            siblings=siblings,
        )
