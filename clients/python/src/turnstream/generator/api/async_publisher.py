"""The publisher for asyncio: writes return at once, one task sends them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from turnstream.generator.api.group_writers import AsyncGroupWriter
from turnstream.generator.api.publisher_core import PublisherCore
from turnstream.generator.api.trajectory_writers import AsyncTrajectoryWriter
from turnstream.generator.api.work import AsyncTask
from turnstream.generator.encode.group_checks import checked_key
from turnstream.generator.outbox.receipts import AsyncReceipt
from turnstream.generator.transport.sender import Sender
from turnstream.generator.transport.transport import Transport
from turnstream.store.run.leases import LapsedTrajectory
from turnstream.store.run.rewards import RewardOutcome
from turnstream.store.run.tasks import Refill
from turnstream.types import Group, TrajectoryKey


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
