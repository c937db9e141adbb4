"""The publisher for asyncio: writes return at once, one task sends them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Self

from turnstream.errors import ConflictError, FencedError, NotReadyError, TurnstreamError, WaitKind
from turnstream.generator.api.adoption import Reopening
from turnstream.generator.api.group_writers import AsyncGroupWriter
from turnstream.generator.api.publisher_core import (
    LAST_FLUSH_S,
    PublisherCore,
    checked_key,
    raise_unread,
    warn_open_trajectories,
)
from turnstream.generator.api.trajectory_writers import AsyncTrajectoryWriter
from turnstream.generator.api.work import AsyncTask
from turnstream.generator.outbox.inflight import PublisherStatistics
from turnstream.generator.outbox.receipts import AsyncReceipt
from turnstream.generator.outbox.trajectory_queue import Lane
from turnstream.generator.transport.async_sender import AsyncSender
from turnstream.generator.transport.steps import take_steps_async
from turnstream.store.client.cancellation import to_the_end
from turnstream.store.client.connection import connect_async
from turnstream.store.run.groups import Refill
from turnstream.store.run.leases import LapsedTrajectory, list_lapsed_async
from turnstream.store.run.rewards import RewardOutcome
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.types import Group, GroupOpened, TrajectoryKey
from turnstream.types.names import checked_setting
from turnstream.types.scalars import seconds, timeout


class AsyncPublisher(
    PublisherCore[AsyncSender, AsyncReceipt, AsyncGroupWriter, AsyncTrajectoryWriter]
):
    """Sends the trajectories of one generator to a run; an asynchronous context manager.

    The same as `Publisher`, for one event loop: blocking calls are coroutines here. A task renews
    the leases, so a call that blocks the loop for as long as a lease belongs in a thread.

    Its arguments are those of `Publisher`.
    """

    def _connect(self, url: str) -> AsyncSender:
        self._client = connect_async(url)  # connects when it is first used
        return AsyncSender(url, self._outbox)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            await self.close()
            return
        try:
            with contextlib.suppress(NotReadyError):
                await self._sender.flush(LAST_FLUSH_S)
        finally:
            await self._close()

    async def lapsed(self) -> list[LapsedTrajectory]:
        """Trajectories of the run that may be adopted now. See `Publisher.lapsed`."""
        wait = self._wait(f"run {self._outbox.run!r}: what has lapsed was not listed")
        run = await take_steps_async(self._client, self._found(), wait)
        async with wait.bounded_async():
            return await list_lapsed_async(self._client, run)

    async def adopt(self, group_id: str, sample: int, attempt: int = 0) -> AsyncTrajectoryWriter:
        """Continue a trajectory whose writer is gone. See `Publisher.adopt`."""
        key = checked_key(group_id, sample, attempt)
        self._sender.require_open()
        declared = await self._sender.learn_columns()
        wait = self._wait(f"run {self._outbox.run!r}: {key.readable_name} was not adopted")
        return await take_steps_async(self._client, self._adopt(key, declared), wait)

    async def post_reward(
        self,
        key: TrajectoryKey,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
    ) -> RewardOutcome:
        """Give a trajectory that was sealed with `awaits_reward` its reward.

        The trajectory may be another generator's. See `turnstream.store.run.rewards.post_reward`.
        """
        post, receipt = self._reward(key, reward, reward_components)
        await receipt
        return RewardOutcome(post.outcome)

    async def next_refill(self, timeout_s: float) -> Refill:
        """Take a sample that is to be tried again, in a group of any generator.

        The attempt is open and this publisher's; `refill_trajectory` writes it.

        Raises:
            NotReadyError: there was none within `timeout_s`.
            StoreUnavailableError: the store cannot be reached, or did not answer by then.
        """
        timeout_s = seconds(timeout_s, field="timeout_s")
        what = f"run {self._outbox.run!r}: no sample was to be tried again"
        wait = self._wait(what, WaitKind.NO_REFILL, timeout_s)
        return await take_steps_async(self._client, self._next_refill(wait), wait)

    async def next_task(self, wait_s: float) -> AsyncTask[AsyncTrajectoryWriter]:
        """Take a refill if there is one, else the next prompt. See `Publisher.next_task`."""
        self._sender.require_open()
        wait_s = seconds(wait_s, field="wait_s")
        wait = self._wait(f"run {self._outbox.run!r}: no task", WaitKind.NO_TASK, wait_s)
        task, trajectories = await take_steps_async(self._client, self._next_task(wait), wait)
        return AsyncTask(task, trajectories)

    async def publish(self, group: Group) -> AsyncReceipt:
        """Send a whole finished group. See `Publisher.publish`; the receipt can be awaited."""
        try:
            declared = await self._sender.learn_columns()
        except TurnstreamError as error:
            return self._failed(error)
        opening, drafted = self._drafted(group, declared)
        await self._sender.wait_until(
            self._has_capacity(drafted), timeout_s=self._capacity_timeout_s
        )
        return self._sent(opening, drafted)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted is acknowledged. See `Publisher.flush`."""
        await self._sender.flush(timeout(timeout_s, field="timeout_s"))
        raise_unread(self._unread_failures, self._outbox.take_losses())

    async def flush_to_disk(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted is on the store's disk. See `Publisher.flush_to_disk`."""
        await self._sender.flush_to_disk(timeout(timeout_s, field="timeout_s"))
        await self.flush(timeout_s)

    def statistics(self) -> PublisherStatistics:
        """Return the counts so far."""
        return self._outbox.statistics()

    async def close_run(self, reason: str = "") -> None:
        """Send what was accepted, then close the run to new groups."""
        checked_setting(reason, field="reason")
        await self.flush()
        await self._closing(reason)

    async def close(self, timeout_s: float | None = None) -> None:
        """Send all accepted writes, then disconnect. Safe to repeat. See `Publisher.close`."""
        timeout_s = timeout(timeout_s, field="timeout_s")
        try:
            await self.flush(timeout_s)
        finally:
            await self._close()

    def _wait(
        self, what: str, kind: WaitKind | None = None, wait_s: float | None = None
    ) -> StoreWait:
        wait_s = self._outbox.timeout_s if wait_s is None else wait_s
        clock = asyncio.get_running_loop().time
        return StoreWait(self._client, kind, what, wait_s=wait_s, clock=clock)

    async def _close(self) -> None:
        warn_open_trajectories(self._outbox)
        await to_the_end(self._disconnect())

    async def _disconnect(self) -> None:
        await self._sender.close()
        await self._client.aclose()

    def _group_writer(self, group: GroupOpened, *, exist_ok: bool) -> AsyncGroupWriter:
        reopen = self._reopen if exist_ok else None
        return AsyncGroupWriter(
            self._sender, self._outbox, group, make_writer=self._writer, reopen=reopen
        )

    async def _reopen(self, group: GroupOpened) -> Reopening[AsyncTrajectoryWriter]:
        """Return the unfinished samples of a group that may exist, those without turns adopted."""
        wait = self._wait(f"run {self._outbox.run!r}: group {group.group_id} was not read")
        unfinished = await take_steps_async(self._client, self._unfinished(group), wait)
        reopening = Reopening[AsyncTrajectoryWriter](group.group_id, unfinished)
        while reopening.pending:
            for sample in [*reopening.pending]:
                if self._is_written_here(TrajectoryKey(group.group_id, sample)):
                    reopening.skip(sample)
                    continue
                try:
                    reopening.adopted(sample, await self.adopt(group.group_id, sample))
                except (ConflictError, FencedError) as error:
                    reopening.refused(sample, error)
            await asyncio.sleep(reopening.pause_s)
        return reopening

    def _writer(
        self, group: GroupOpened, key: TrajectoryKey, lane: Lane | None = None
    ) -> AsyncTrajectoryWriter:
        return AsyncTrajectoryWriter(self._sender, self._outbox, group, key, lane)
