"""The SDK of generators: turns go into the store as they are sampled."""

from turnstream.generator.api.group_writers import AsyncGroupWriter, GroupWriter
from turnstream.generator.api.publisher import AsyncPublisher, Publisher
from turnstream.generator.api.sessions import AgentSession, AsyncAgentSession
from turnstream.generator.api.trajectory_writers import AsyncTrajectoryWriter, TrajectoryWriter
from turnstream.generator.api.work import AsyncTask, Task
from turnstream.generator.outbox.receipts import AsyncReceipt, PublisherStatistics, Receipt
from turnstream.store.run.credits import Credit, CreditReason, credit
from turnstream.store.run.groups import LapsedTrajectory
from turnstream.store.run.rewards import RewardOutcome, post_reward
from turnstream.store.run.tasks import Prompt, Refill, add_prompts

__all__ = [
    "AgentSession",
    "AsyncAgentSession",
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
    "post_reward",
]
