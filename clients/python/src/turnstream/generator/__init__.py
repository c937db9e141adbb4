"""What generators use: turns in, as they are sampled, into the store."""

from turnstream.generator.async_publisher import (
    AsyncGroupWriter,
    AsyncPublisher,
    AsyncTrajectoryWriter,
)
from turnstream.generator.publisher import GroupWriter, Publisher, TrajectoryWriter
from turnstream.generator.receipts import AsyncReceipt, Receipt
from turnstream.generator.statistics import PublisherStatistics
from turnstream.store.leases import LapsedTrajectory

__all__ = [
    "AsyncGroupWriter",
    "AsyncPublisher",
    "AsyncReceipt",
    "AsyncTrajectoryWriter",
    "GroupWriter",
    "LapsedTrajectory",
    "Publisher",
    "PublisherStatistics",
    "Receipt",
    "TrajectoryWriter",
]
