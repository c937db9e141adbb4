"""What generators use: turns in, as they are sampled, into the store."""

from turnstream.generator.async_publisher import (
    AsyncGroupWriter,
    AsyncPublisher,
    AsyncTrajectoryWriter,
)
from turnstream.generator.publisher import GroupWriter, Publisher, TrajectoryWriter
from turnstream.generator.receipts import AsyncReceipt, Receipt
from turnstream.generator.tally import PublisherStatistics
from turnstream.generator.tasks import AsyncTask, Task
from turnstream.store.credits import Credit, CreditReason, credit, credit_async
from turnstream.store.groups import Refill
from turnstream.store.leases import LapsedTrajectory
from turnstream.store.rewards import RewardOutcome, post_reward, post_reward_async
from turnstream.store.tasks import Prompt, add_prompts

__all__ = [
    "AsyncGroupWriter",
    "AsyncPublisher",
    "AsyncReceipt",
    "AsyncTask",
    "AsyncTrajectoryWriter",
    "Credit",
    "CreditReason",
    "GroupWriter",
    "LapsedTrajectory",
    "Prompt",
    "Publisher",
    "PublisherStatistics",
    "Receipt",
    "Refill",
    "RewardOutcome",
    "Task",
    "TrajectoryWriter",
    "add_prompts",
    "credit",
    "credit_async",
    "post_reward",
    "post_reward_async",
]
