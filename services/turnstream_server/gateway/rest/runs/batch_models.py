"""Models of batches."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from turnstream_server.bus.queries.batch_numbers import BatchNumbers


class BatchLine(BaseModel):
    """A planned batch, without its trajectories."""

    run: str
    step: int = Field(examples=[3])
    state: str = Field(description="planned, stepped or committed.", examples=["stepped"])
    revision: int = Field(description="Above 0 if it was planned again because of damage.")
    manifest_hash: str = Field(description="Its name in the chain of batches.")
    previous_hash: str
    lineage: str
    config_revision: int = Field(description="Number of the settings that it was planned with.")
    numbers: BatchNumbers
    num_mini_batches: int


class BatchList(BaseModel):
    """Batches that are stored, in order."""

    batches: list[BatchLine]
    next_step: int | None = Field(
        description="`from_step` of the next page; null if there is no further batch."
    )


class PlannedTrajectory(BaseModel):
    """A trajectory of a mini-batch."""

    id: str = Field(examples=["task-7/0/0"])
    prompt_uid: str
    status: str
    reward: float
    advantage: float
    turn_advantages: list[float]
    weights: list[float] = Field(description="Weight of each row in the loss.")
    num_rows: int


class MiniBatch(BaseModel):
    """The rows of one optimizer update."""

    denominators: dict[str, float] = Field(description="Divisors of the sums of a loss.")
    num_rows: int
    first_row_id: int
    trajectories: list[PlannedTrajectory]


class PastTrajectory(BaseModel):
    """A trajectory of a released batch."""

    id: str
    crc: str = Field(description="Checksum of its payload.")


class Batch(BaseModel):
    """A batch with its mini-batches. A released one has names and checksums alone."""

    run: str
    step: int
    state: str = Field(examples=["stepped"])
    manifest_hash: str
    lineage: str
    mean_reward: float | None = Field(None, description="Of a released batch.")
    revision: int | None = None
    previous_hash: str | None = None
    config_revision: int | None = None
    numbers: BatchNumbers | None = None
    figures: dict[str, Any] | None = Field(None, description="Statistics of tags and metrics.")
    mini_batches: list[MiniBatch] = Field(description="Empty if the batch is released.")
    trajectories: list[PastTrajectory] | None = Field(None, description="Only of a released batch.")
