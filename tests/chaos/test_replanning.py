"""A leader that is killed while it withdraws plans of damaged payload: its successor goes on."""

from __future__ import annotations

from typing import Any

import pytest

from harness.rig import CONFIG, PATIENCE_S, Rig
from turnstream.store import keys
from turnstream_server.bus.frontier import read_frontier
from turnstream_server.bus.manifests import read_plan
from turnstream_server.bus.replans import await_replan, request_replan

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]

NUM_PLANNED = CONFIG.max_planned_ahead + 1


@pytest.mark.parametrize("failpoint", ["replan.before_write", "replan.after_write"])
def test_a_leader_killed_around_a_withdrawal_is_followed_by_one_that_ends_it(
    rig: Rig, failpoint: str
) -> None:
    rig.join(rig.start_generator(groups=12, samples=3))
    first = rig.start_batcher("first").service
    rig.wait(lambda: rig.planned() == NUM_PLANNED, "the plan")
    first.kill()
    plan = read_plan(rig.client, rig.run, 1)
    assert plan is not None
    damaged = keys.trajectory_id(plan.manifest.groups[0].trajectories[0].key)
    _damage(rig, damaged)

    request = request_replan(rig.client, rig.run)
    rig.let_batcher_die(failpoint)
    is_done = failpoint == "replan.after_write"
    assert read_frontier(rig.client, rig.run).planned == (0 if is_done else NUM_PLANNED)
    rig.start_batcher()
    done = await_replan(rig.client, rig.run, request, wait_s=PATIENCE_S)
    rig.excused = {damaged}
    rig.loses_plans = True
    rig.drain()

    assert (done.first_step, done.newest_step, done.dead) == (1, NUM_PLANNED, (damaged,))
    assert rig.counts()["committed"] == 12 * 3 - 1
    assert rig.counts()["dead"] == 1


def _damage(rig: Rig, trajectory_id: str) -> None:
    """Overwrite a byte of its first turn."""
    turns = keys.trajectory_keys(rig.run, trajectory_id).turns
    entries: Any = rig.client.xrange(turns)
    rig.client.delete(turns)
    for number, (entry_id, fields) in enumerate(entries):
        record = bytearray(fields[b"r"])
        record[-9] ^= number == 0
        rig.client.xadd(turns, {"r": bytes(record)}, id=entry_id)
