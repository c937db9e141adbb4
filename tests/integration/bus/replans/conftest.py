"""Requests to plan again."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from turnstream.store.client.connection import connect
from turnstream.types import TrajectoryDied
from turnstream_server.bus.planning.replans import Withdrawal, request_replan, withdraw_plans


@pytest.fixture
def ask(server: Any):
    """Stores a request in a run."""

    def request(run: Any) -> str:
        with connect(server.url) as client:
            return request_replan(client, run.name)

    return request


@pytest.fixture
def from_step():
    """Makes the withdrawal of the plans from a step on; their first trajectory is dead."""

    def make(run: Any, first: int, **changes: Any) -> Withdrawal:
        plans = [stored for step, stored in sorted(run.manifests.items()) if step >= first]
        members = [t.key for p in plans for g in p.manifest.groups for t in g.trajectories]
        withdrawal = Withdrawal(
            first_step=first,
            newest_step=plans[-1].manifest.step,
            manifest_hash=plans[-1].hash,
            dead=[TrajectoryDied(key=members[0], reason="checksum")],
            lease_epochs=dict.fromkeys(members[1:], 1),
            position="7-1",
            snapshot=b"what a planner knows",
        )
        return dataclasses.replace(withdrawal, **changes)

    return make


@pytest.fixture
def withdraw_from(ask: Any, from_step: Any):
    """Withdraws the plans of a run from a step on."""

    async def withdraw(run: Any, first: int) -> None:
        await withdraw_plans(run.term, ask(run), from_step(run, first))

    return withdraw
