"""The publisher for asyncio: writes return at once, one task sends them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from turnstream.errors import NotReadyError, RejectedError, TurnstreamError
from turnstream.generator import writers
from turnstream.generator.async_sender import AsyncSender
from turnstream.generator.checks import checked_turn
from turnstream.generator.drafts import draft_group
from turnstream.generator.extras import with_checked_extras
from turnstream.generator.lanes import Lane, RewardPost
from turnstream.generator.outbox import Outbox
from turnstream.generator.receipts import AsyncReceipt, Delivery
from turnstream.generator.refills import take_refill_async
from turnstream.generator.statistics import PublisherStatistics
from turnstream.generator.takeovers import take_over_async
from turnstream.generator.tasks import AsyncTask, take_task_async, task_states
from turnstream.generator.window import KEEP_S, MAX_KEPT_BYTES
from turnstream.generator.writers import WriterState
from turnstream.store.connection import connect_async
from turnstream.store.groups import Refill
from turnstream.store.leases import LapsedTrajectory, list_lapsed_async
from turnstream.store.rewards import RewardOutcome, reward_command
from turnstream.types import Group, GroupOpened, Purpose, Status, TrajectoryKey, Turn, VersionRun


class AsyncPublisher:
    """Sends the trajectories of one generator to a run; an asynchronous context manager.

    The same as `Publisher`, for one event loop: what waits there is awaited here. A task of it
    keeps the leases: what blocks the loop for as long as a lease belongs into a thread.

    Args:
        url: `redis://`, `rediss://` or `unix://` address of the store.
        run: name of the run, which must exist.
        writer: name of this generator, which holds the leases of its trajectories; the same name
            again is the same generator. None makes a name up.
        max_inflight_bytes: accepted and not yet acknowledged; writes wait above it.
        timeout_s: how long the store may be away or full before accepted writes fail.
        admission_timeout_s: how long a group may wait for leave to start.
        keep_s: for how long what the store has acknowledged is kept, to be sent again to a store
            that comes back without it; 0 keeps nothing. Nothing is kept for a store that syncs
            before it answers.
        max_kept_bytes: bound of that; beyond it the oldest turns are kept for less long.
    """

    def __init__(
        self,
        url: str,
        run: str,
        *,
        writer: str | None = None,
        max_inflight_bytes: int = writers.MAX_INFLIGHT_BYTES,
        timeout_s: float = writers.TIMEOUT_S,
        admission_timeout_s: float = writers.ADMISSION_TIMEOUT_S,
        keep_s: float = KEEP_S,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._outbox = writers.new_outbox(
            run,
            writer=writer,
            max_inflight_bytes=max_inflight_bytes,
            timeout_s=timeout_s,
            admission_timeout_s=admission_timeout_s,
            keep_s=keep_s,
            max_kept_bytes=max_kept_bytes,
        )
        self._sender = AsyncSender(url, run, self._outbox)
        self._client = connect_async(
            url
        )  # for calls that wait for their answer; connects when used
        self._unread_failures: list[Delivery] = []
        self._tried_refills: dict[TrajectoryKey, object] = {}
        self._url = url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            await self.close()
            return
        try:
            with contextlib.suppress(NotReadyError):
                await self._sender.flush(writers.LAST_FLUSH_S)
        finally:
            await self._close()

    def group(
        self,
        group_id: str,
        num_samples: int,
        *,
        num_needed: int | None = None,
        prompt_uid: str = "",
        purpose: Purpose | str = Purpose.TRAIN,
    ) -> AsyncGroupWriter:
        """A group of which this publisher writes every sample. See `Publisher.group`."""
        group = writers.checked_opening(
            group_id, num_samples, prompt_uid, num_needed=num_needed, purpose=purpose
        )
        return AsyncGroupWriter(self._sender, self._outbox, group)

    def trajectory(
        self,
        group_id: str,
        sample: int,
        *,
        num_samples: int,
        num_needed: int | None = None,
        prompt_uid: str = "",
        purpose: Purpose | str = Purpose.TRAIN,
        attempt: int = 0,
    ) -> AsyncTrajectoryWriter:
        """One sample of a group that several generators may share. See `Publisher.trajectory`."""
        group = writers.checked_opening(
            group_id, num_samples, prompt_uid, num_needed=num_needed, purpose=purpose
        )
        key = TrajectoryKey(group_id, sample, attempt)
        return AsyncTrajectoryWriter(self._sender, WriterState(self._outbox, group, key, None))

    async def lapsed(self) -> list[LapsedTrajectory]:
        """Trajectories of the run that may be taken over now. See `Publisher.lapsed`."""
        return await list_lapsed_async(self._client, self._outbox.run)

    async def take_over(
        self, group_id: str, sample: int, attempt: int = 0
    ) -> AsyncTrajectoryWriter:
        """Go on with a trajectory whose writer is gone. See `Publisher.take_over`."""
        key = writers.checked_key(group_id, sample, attempt)
        outbox = self._outbox
        self._sender.require_open()
        declared = await self._sender.learn_columns()
        taken = await take_over_async(
            self._client, outbox.run, writer=outbox.writer, key=key, declared=declared
        )
        self._sender.require_open()
        state = WriterState.taken_over(outbox, key, taken, time.monotonic())
        self._sender.start()
        return AsyncTrajectoryWriter(self._sender, state)

    async def post_reward(
        self,
        key: TrajectoryKey,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
    ) -> RewardOutcome:
        """Give a trajectory that was sealed with `awaits_reward` its reward.

        The trajectory may be another generator's. See `turnstream.store.rewards.post_reward`.
        """
        command = reward_command(self._outbox.run, key, reward, reward_components)
        post = RewardPost(command, receipt := AsyncReceipt())
        self._sender.require_open()
        self._outbox.post_reward(post)
        self._sender.start()
        await receipt
        return RewardOutcome(post.outcome)

    async def next_refill(self, timeout_s: float) -> Refill:
        """Take a sample that is to be tried again, in a group of any generator.

        The attempt is open and this publisher's; `refill_trajectory` writes it.

        Raises:
            NotReadyError: there was none within `timeout_s`.
            StoreUnavailableError: the store cannot be reached.
        """
        return await take_refill_async(
            self._client,
            self._outbox.run,
            writer=self._outbox.writer,
            timeout_s=timeout_s,
            tried=self._tried_refills,
        )

    def refill_trajectory(self, refill: Refill) -> AsyncTrajectoryWriter:
        """The writer of an attempt that `next_refill` gave."""
        state = WriterState(self._outbox, refill.group, refill.key, None)
        return AsyncTrajectoryWriter(self._sender, state)

    async def next_task(self, wait_s: float) -> AsyncTask[AsyncTrajectoryWriter]:
        """Take a refill if there is one, else the next prompt. See `Publisher.next_task`."""
        outbox = self._outbox
        self._sender.require_open()
        taken = await take_task_async(self._client, outbox.run, writer=outbox.writer, wait_s=wait_s)
        self._sender.require_open()
        states = task_states(outbox, taken, time.monotonic())
        self._sender.start()
        return AsyncTask(taken, [AsyncTrajectoryWriter(self._sender, each) for each in states])

    async def publish(self, group: Group) -> AsyncReceipt:
        """Send a whole finished group. See `Publisher.publish`; the receipt can be awaited."""
        try:
            declared = await self._sender.learn_columns()
        except TurnstreamError as error:
            return self._failed(error)
        drafted = draft_group(group, extra_columns=declared)
        opening = writers.checked_opening(
            group.group_id, len(drafted), group.prompt_uid, purpose=group.purpose
        )
        receipt = AsyncReceipt(len(drafted), unread_failures=self._unread_failures)
        num_bytes = sum(len(turn.record) for made in drafted for turn in made.turns)
        await self._sender.wait_until(lambda: self._outbox.tally.has_room_for_group(num_bytes))
        self._sender.require_open()
        writers.send_group(self._outbox, group=opening, drafted=drafted, end=receipt)
        self._sender.start()
        return receipt

    def _failed(self, error: TurnstreamError) -> AsyncReceipt:
        """The receipt of a group that could not be checked, since the run did not answer."""
        self._sender.require_open()
        receipt = AsyncReceipt(unread_failures=self._unread_failures)
        receipt.settle(None, error)
        return receipt

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted is acknowledged.

        Raises:
            NotReadyError: that was not so within `timeout_s`.
            TurnstreamError: a published group failed, and its receipt was not asked; or the store
                came back without something that it had acknowledged and that is no longer kept.
        """
        await self._sender.flush(timeout_s)
        writers.raise_unread(self._unread_failures, self._outbox.take_losses())

    async def flush_to_disk(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted is on the store's disk. See `Publisher.flush_to_disk`."""
        await self._sender.flush_to_disk(timeout_s)
        await self.flush(timeout_s)

    def statistics(self) -> PublisherStatistics:
        """What happened so far."""
        return self._outbox.statistics()

    async def close_run(self, reason: str = "") -> None:
        """Send what was accepted, then close the run to new groups."""
        await self.flush()
        receipt = AsyncReceipt()
        self._sender.require_open()
        self._outbox.close_run(reason, receipt)
        self._sender.start()
        await receipt

    async def close(self, timeout_s: float | None = None) -> None:
        """Send what was accepted, then disconnect. Safe to repeat.

        Trajectories that are open stay so until their leases end: until then this generator, by its
        name, may take them over, then any other; see `lease_s` and `takeover_s` of the run.

        Raises:
            NotReadyError: not all of it was sent within `timeout_s`; the rest was given up.
            TurnstreamError: a published group failed, and its receipt was not asked.
        """
        try:
            await self.flush(timeout_s)
        finally:
            await self._close()

    async def _close(self) -> None:
        writers.tell_what_stays_open(self._outbox)
        await self._sender.close()
        await self._client.aclose()


class AsyncGroupWriter:
    """A group being written; made by `AsyncPublisher.group`. See `GroupWriter`."""

    def __init__(self, sender: AsyncSender, outbox: Outbox, group: GroupOpened) -> None:
        self._sender = sender
        self._outbox = outbox
        self._group = group
        self._lanes: list[Lane] = []
        self._writers: dict[int, AsyncTrajectoryWriter] = {}

    async def __aenter__(self) -> Self:
        group = self._group
        members = [TrajectoryKey(group.group_id, sample) for sample in range(group.num_samples)]
        opened = AsyncReceipt()
        self._sender.require_open()
        self._lanes = self._outbox.admit(group, members, opened=opened)
        self._sender.start()
        try:
            await opened
        except BaseException as error:
            self._give_up(error)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._give_up(error)

    def trajectory(self, sample: int) -> AsyncTrajectoryWriter:
        """The writer of one sample, open already; the same writer for the same sample.

        Raises:
            InvalidTurnError: the group has no such sample.
            RejectedError: the group was not entered.
        """
        writer = self._writers.get(sample)
        if writer is None:
            key = TrajectoryKey(self._group.group_id, sample)
            state = WriterState(self._outbox, self._group, key, None)
            if not self._lanes:
                raise RejectedError(f"group {key.group_id!r} is not open: use it in `async with`")
            state.lane = self._lanes[sample]
            writer = self._writers[sample] = AsyncTrajectoryWriter(self._sender, state)
        return writer

    def _give_up(self, error: BaseException | None) -> None:
        """Abandon whatever was not sealed."""
        for sample in range(len(self._lanes)):
            is_started = sample in self._writers
            writer = self.trajectory(sample)
            if not writer.has_ended:
                reason = writers.NOT_STARTED if error is None and not is_started else ""
                writer.abandon(reason or writers.reason_of(error))


class AsyncTrajectoryWriter:
    """A trajectory being written; made by `AsyncPublisher` and `AsyncGroupWriter`.

    Leaving it by an exception, or without `seal`, abandons the trajectory. Several tasks may
    append: the turns are numbered here.
    """

    def __init__(self, sender: AsyncSender, state: WriterState) -> None:
        self._sender = sender
        self._state = state
        self._order = asyncio.Lock()

    async def __aenter__(self) -> Self:
        async with self._order:
            await self._opened_lane()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self.has_ended:
            self.abandon(writers.reason_of(error))

    @property
    def key(self) -> TrajectoryKey:
        """The name of the trajectory in its run."""
        return self._state.key

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that were stored when it was taken over, whole; empty if it was not."""
        return self._state.turns

    @property
    def has_ended(self) -> bool:
        """Whether it was sealed or abandoned."""
        return self._state.has_ended

    async def append(
        self,
        prompt_ids: Any,
        response_ids: Any,
        *,
        logprobs: Any = None,
        loss_mask: Any = None,
        rewards: Any = None,
        version: int | None = None,
        version_runs: Sequence[VersionRun] = (),
        extras: Mapping[str, Any] | None = None,
        allow_empty: bool = False,
    ) -> AsyncReceipt:
        """Send one turn; return before the store has answered. See `TrajectoryWriter.append`."""
        turn = checked_turn(
            prompt_ids,
            response_ids,
            logprobs=logprobs,
            loss_mask=loss_mask,
            rewards=rewards,
            version=version,
            version_runs=version_runs,
            allow_empty=allow_empty,
        )
        turn = with_checked_extras(turn, extras, await self._sender.learn_columns())
        receipt = AsyncReceipt()
        async with self._order:
            lane = await self._opened_lane()
            # Room first: whatever the draft has counted must be sent.
            await self._sender.wait_until(lambda: self._state.has_room(turn))
            self._state.require_open()
            self._sender.require_open()
            self._state.append(lane, self._state.draft.add(turn), receipt)
            self._sender.start()
        return receipt

    async def seal(
        self,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
        status: Status | str = Status.COMPLETED,
        sampling: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        awaits_reward: bool = False,
    ) -> None:
        """End the trajectory and wait until the run knows of it. See `TrajectoryWriter.seal`."""
        end = AsyncReceipt()
        async with self._order:
            lane = await self._opened_lane()
            self._sender.require_open()
            self._state.seal(
                lane,
                end,
                reward=reward,
                reward_components=reward_components,
                status=status,
                sampling=sampling,
                tags=tags,
                metrics=metrics,
                awaits_reward=awaits_reward,
            )
            self._sender.start()
        await end

    def abandon(self, reason: str) -> AsyncReceipt:
        """Give the trajectory up: none of it is trained. Returns before the store has answered.

        Raises:
            RejectedError: the trajectory has ended.
        """
        end = AsyncReceipt()
        self._sender.require_open()
        self._state.abandon(reason, end)
        self._sender.start()
        return end

    async def _opened_lane(self) -> Lane:
        self._state.require_open()
        if self._state.lane is None:
            opened = AsyncReceipt()
            self._sender.require_open()
            self._state.lane = self._state.ask_leave(opened)
            self._sender.start()
            try:
                await opened
            except BaseException as error:
                self.abandon(writers.reason_of(error))
                raise
        return self._state.lane
