"""The public surface of the generator SDK: what is here is promised, anything else may change."""

from __future__ import annotations

import inspect

import turnstream.generator
from turnstream.generator import (
    AsyncGroupWriter,
    AsyncPublisher,
    AsyncTrajectoryWriter,
    GroupWriter,
    Publisher,
    PublisherStatistics,
    TrajectoryWriter,
)


def public_methods(kind: type) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") or name == "__init__"
    }


def test_these_names_are_public() -> None:
    assert turnstream.generator.__all__ == [
        *("AgentSession", "AsyncAgentSession"),
        *("AsyncGroupWriter", "AsyncPublisher", "AsyncReceipt", "AsyncTask"),
        *("AsyncTrajectoryWriter", "Credit", "CreditReason", "GroupWriter", "LapsedTrajectory"),
        *("Prompt", "Publisher", "PublisherStatistics", "Receipt", "Refill", "RewardOutcome"),
        *("Task", "TrajectoryWriter", "add_prompts", "credit"),
        "post_reward",
    ]


def test_both_publishers_are_called_alike() -> None:
    assert public_methods(Publisher) == public_methods(AsyncPublisher)
    assert sorted(public_methods(Publisher)) == [
        *("__init__", "adopt", "close", "close_run", "flush", "flush_to_disk"),
        *("group", "lapsed", "next_refill", "next_task", "post_reward", "publish"),
        "refill_trajectory",
        *("statistics", "trajectory"),
    ]


def test_both_kinds_of_writers_are_called_alike() -> None:
    for one, other in ((GroupWriter, AsyncGroupWriter), (TrajectoryWriter, AsyncTrajectoryWriter)):
        theirs = public_methods(other)
        assert {**public_methods(one), "__init__": []} == {**theirs, "__init__": []}


def test_statistics_are_these() -> None:
    assert list(PublisherStatistics.__slots__) == [
        *("num_trajectories", "num_abandoned", "num_turns", "wire_bytes", "resend_bytes"),
        *("turn_tokens", "merged_tokens", "num_duplicates", "num_retries", "num_waits"),
        *("wait_s", "num_restarts", "num_resent", "num_lost", "num_forgotten"),
        *("kept_bytes", "max_kept_bytes", "inflight_bytes", "max_inflight_bytes"),
    ]
