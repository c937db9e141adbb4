"""The publishers, for threads and for asyncio: writes return at once, one task sends them.

The task of a publisher for threads runs in a daemon thread.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, Self

from turnstream.generator.api.group_writers import AsyncGroupWriter, GroupWriter
from turnstream.generator.api.publisher_core import PublisherCore
from turnstream.generator.api.trajectory_writers import AsyncTrajectoryWriter, TrajectoryWriter
from turnstream.generator.api.work import AsyncTask, Task
from turnstream.generator.encode.encoder import draft_group
from turnstream.generator.encode.group_checks import checked_key
from turnstream.generator.outbox.receipts import AsyncReceipt, Receipt
from turnstream.generator.transport.sender import Sender
from turnstream.generator.transport.thread_sender import ThreadSender
from turnstream.generator.transport.transport import Transport
from turnstream.store.run.groups import LapsedTrajectory
from turnstream.store.run.rewards import RewardOutcome
from turnstream.store.run.tasks import Refill
from turnstream.types import Group, TrajectoryKey
from turnstream.types.names import timeout


class Publisher(PublisherCore[Receipt, GroupWriter, TrajectoryWriter]):
    """Sends the trajectories of one generator to a run; a context manager.

    Accepted writes are sent until the store acknowledges them, over restarts and while the store is
    full, for at most `timeout_s`. Several threads may use it.

    Its thread also renews the leases of the open trajectories. A trajectory whose lease was lost,
    for example while the machine slept, raises FencedError with its new owner. The others continue.

    Args:
        url: `redis://`, `rediss://` or `unix://` address of the store.
        run: name of the run, which must exist. The first contact with the store finds the run that
            has the name then; this publisher never writes to a later run of that name.
        writer: name of this generator, which holds the leases of its trajectories; the same name
            again is the same generator. None makes a name up.
        max_inflight_bytes: limit of the unacknowledged bytes; writes wait above it.
        timeout_s: how long the store may be away or full before accepted writes fail.
        admission_timeout_s: how long a group may wait for admission.
        keep_s: seconds for which acknowledged writes are kept, to be sent again to a restarted
            store that lost them; 0 keeps nothing. Nothing is kept for a store that syncs before it
            answers.
        max_kept_bytes: limit of the kept bytes; beyond it the oldest turns are dropped.
    """

    _group_kind = GroupWriter
    _writer_kind = TrajectoryWriter

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._finish(self._exit(error))

    def lapsed(self) -> list[LapsedTrajectory]:
        """Return the trajectories of the run that may be adopted now, the longest lapsed first.

        At most MAX_LAPSED of them. Another generator may be faster.

        Raises:
            RunNotFoundError: no such run.
            StoreUnavailableError: the store cannot be reached, or did not answer for `timeout_s`.
        """
        return self._threads.run(self._lapsed())

    def adopt(self, group_id: str, sample: int, attempt: int = 0) -> TrajectoryWriter:
        """Continue a trajectory whose writer is gone, from the next turn.

        The returned writer has its stored turns in `turns`. Later writes of the earlier writer are
        refused. A generator of the same name as the earlier writer does not wait for the end of the
        lease.

        Raises:
            InvalidTurnError: the key is invalid.
            ConflictError: its lease lasts for `retry_after_s` more, or it is not open.
            FencedError: another generator was faster.
            RecordError: a stored turn is damaged; the trajectory lapses later.
            StoreUnavailableError: the store cannot be reached, or did not answer for `timeout_s`.
        """
        return self._threads.run(self._adopt(checked_key(TrajectoryKey(group_id, sample, attempt))))

    def post_reward(
        self,
        key: TrajectoryKey,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
    ) -> RewardOutcome:
        """Post the reward of a trajectory that was sealed with `awaits_reward`.

        The trajectory may be another generator's. See `turnstream.store.run.rewards.post_reward`.
        """
        return self._threads.run(self._post_reward(key, reward, reward_components))

    def next_refill(self, timeout_s: float) -> Refill:
        """Take a sample that is to be tried again, in a group of any generator.

        The attempt is open and this publisher's; `refill_trajectory` writes it.

        Raises:
            NotReadyError: there was none within `timeout_s`.
            RunNotFoundError: no such run.
            StoreUnavailableError: the store cannot be reached, or did not answer by then.
        """
        return self._threads.run(self._next_refill(timeout_s))

    def next_task(self, wait_s: float) -> Task[TrajectoryWriter]:
        """Take the next task of the run: a refill if there is one, else the next prompt.

        The trajectories of the task are open, and this publisher renews their leases.

        Args:
            wait_s: how long to wait for a task, and for the admission of its group.

        Raises:
            NotReadyError: there was none within `wait_s`, with the reason.
            PromptsExhaustedError: every prompt of the run was done by then.
            EndOfRunError: the run is closed.
            StoreUnavailableError: the store cannot be reached, or did not answer by then.
        """
        return Task(*self._threads.run(self._next_task(wait_s)))

    def publish(self, group: Group) -> Receipt:
        """Send a whole finished group; its samples must be 0 to n - 1.

        Waits only for capacity, and at first for the configuration of the run. The receipt is done
        when the run has every trajectory. One that fails does not stop the others, and
        `receipt.errors` names it.

        Raises:
            InvalidTurnError: something in it is wrong; nothing of it was accepted.
        """
        columns = self._outbox.run_calls.extra_columns
        if columns is None:
            return self._threads.run(self._publish(group))
        whole = draft_group(group, extra_columns=columns)
        if not self._has_capacity(whole):
            self._threads.run(self._wait_for_capacity(whole))
        return self._send(whole)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted is acknowledged.

        Raises:
            NotReadyError: writes are unacknowledged after `timeout_s`.
            TurnstreamError: a published group failed, and its receipt was not read; or the store
                lost acknowledged writes that are no longer kept. Several errors are one, with
                `others`.
        """
        self._threads.run(self._flush(timeout_s))

    def flush_to_disk(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted is on the store's disk.

        A store that does not sync before it answers has synced when it still answers `keep_s`
        later. So this takes `keep_s` after the last write of any thread.

        Raises:
            NotReadyError: writes may not be on disk after `timeout_s`.
            TurnstreamError: see `flush`.
        """
        self._threads.run(self._flush_to_disk(timeout_s))

    def close_run(self, reason: str = "") -> None:
        """Send what was accepted, then close the run to new groups."""
        self._threads.run(self._close_run(reason))

    def close(self, timeout_s: float | None = None) -> None:
        """Send all accepted writes, then disconnect. Safe to repeat.

        Open trajectories stay open until their leases end. This generator, by its name, may adopt
        them before that, and any other after it; see `lease_s` and `takeover_s` of the run.

        Raises:
            NotReadyError: writes were unacknowledged after `timeout_s`, and have failed.
            TurnstreamError: a published group failed, and its receipt was not read.
        """
        self._finish(self._close(timeout(timeout_s, field="timeout_s")))

    def _finish(self, closing: Coroutine[Any, Any, None]) -> None:
        """Close, and end the thread; a forked process has accepted nothing, and closes nothing."""
        is_here = self._sender.process.is_here
        if not is_here or self._threads.thread.is_closed:
            closing.close()
            if is_here:
                self._raise_unread()
            return
        try:
            self._threads.run(closing)
        finally:
            self._threads.thread.close()

    def _make_sender(self, transport: Transport) -> ThreadSender:
        self._threads = ThreadSender(transport, self._outbox)
        return self._threads


class AsyncPublisher(PublisherCore[AsyncReceipt, AsyncGroupWriter, AsyncTrajectoryWriter]):
    """Sends the trajectories of one generator to a run; an asynchronous context manager.

    The same as `Publisher`, for one event loop: blocking calls are coroutines here. A task renews
    the leases, so a call that blocks the loop for as long as a lease belongs in a thread.

    Its arguments are those of `Publisher`.
    """

    _group_kind = AsyncGroupWriter
    _writer_kind = AsyncTrajectoryWriter

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self._exit(error)

    async def lapsed(self) -> list[LapsedTrajectory]:
        """Return the trajectories that may be adopted now. See `Publisher.lapsed`."""
        return await self._lapsed()

    async def adopt(self, group_id: str, sample: int, attempt: int = 0) -> AsyncTrajectoryWriter:
        """Continue a trajectory whose writer is gone. See `Publisher.adopt`."""
        return await self._adopt(checked_key(TrajectoryKey(group_id, sample, attempt)))

    async def post_reward(
        self,
        key: TrajectoryKey,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
    ) -> RewardOutcome:
        """Post the reward of a trajectory. See `Publisher.post_reward`."""
        return await self._post_reward(key, reward, reward_components)

    async def next_refill(self, timeout_s: float) -> Refill:
        """Take a sample that is to be tried again. See `Publisher.next_refill`."""
        return await self._next_refill(timeout_s)

    async def next_task(self, wait_s: float) -> AsyncTask[AsyncTrajectoryWriter]:
        """Take a refill if there is one, else the next prompt. See `Publisher.next_task`."""
        return AsyncTask(*await self._next_task(wait_s))

    async def publish(self, group: Group) -> AsyncReceipt:
        """Send a whole finished group. See `Publisher.publish`; the receipt can be awaited."""
        return await self._publish(group)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted is acknowledged. See `Publisher.flush`."""
        await self._flush(timeout_s)

    async def flush_to_disk(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted is on the store's disk. See `Publisher.flush_to_disk`."""
        await self._flush_to_disk(timeout_s)

    async def close_run(self, reason: str = "") -> None:
        """Send what was accepted, then close the run to new groups."""
        await self._close_run(reason)

    async def close(self, timeout_s: float | None = None) -> None:
        """Send all accepted writes, then disconnect. Safe to repeat. See `Publisher.close`."""
        await self._close(timeout_s)

    def _make_sender(self, transport: Transport) -> Sender[AsyncReceipt]:
        return Sender(transport, self._outbox, AsyncReceipt)
