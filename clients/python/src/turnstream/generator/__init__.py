"""What generators use: turns in, as they are sampled, into the store."""

from turnstream.generator.async_publisher import (
    AsyncGroupWriter,
    AsyncPublisher,
    AsyncTrajectoryWriter,
)
from turnstream.generator.publisher import GroupWriter, Publisher, TrajectoryWriter
from turnstream.generator.receipts import AsyncReceipt, Receipt
from turnstream.generator.statistics import PublisherStatistics
from turnstream.generator.tasks import AsyncTask, Task
from turnstream.store.groups import Refill
from turnstream.store.leases import LapsedTrajectory
from turnstream.store.rewards import RewardOutcome, post_reward, post_reward_async

__all__ = [
    "AsyncGroupWriter",
    "AsyncPublisher",
    "AsyncReceipt",
    "AsyncTask",
    "AsyncTrajectoryWriter",
    "GroupWriter",
    "LapsedTrajectory",
    "Publisher",
    "PublisherStatistics",
    "Receipt",
    "Refill",
    "RewardOutcome",
    "Task",
    "TrajectoryWriter",
    "post_reward",
    "post_reward_async",
]
